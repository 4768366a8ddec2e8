//! The admin listener: few connections at once, none of them idle for long.
//!
//! Lives on: the admin thread. Bound: `CONNECTIONS_MAX` connections; the next ones wait in the
//! kernel's backlog.
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// A few scrapers, probes and operators; each connection costs one task and one buffer.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// A connection on which no byte moves for this long is closed. Longer than a scrape interval.
pub(super) const IDLE: Duration = Duration::from_secs(75);
/// After a failed accept (descriptor limit): long enough not to spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts while a connection is free.
pub(super) struct Bounded {
    listener: TcpListener,
    free: Arc<Semaphore>,
    idle: Duration,
}

impl Bounded {
    pub(super) fn new(listener: TcpListener, connections: usize, idle: Duration) -> Self {
        Self {
            listener,
            free: Arc::new(Semaphore::new(connections)),
            idle,
        }
    }
}

impl axum::serve::Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let free = Arc::clone(&self.free)
            .acquire_owned()
            .await
            .expect("never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let connection = Connection {
                        stream,
                        idle: self.idle,
                        expiry: Box::pin(sleep(self.idle)),
                        _free: free,
                    };
                    return (connection, peer);
                }
                Err(error) => {
                    tracing::warn!(%error, "admin accept failed");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One accepted connection. It fails with `TimedOut` once nothing has moved for `idle`.
pub(super) struct Connection {
    stream: TcpStream,
    idle: Duration,
    expiry: Pin<Box<Sleep>>,
    _free: OwnedSemaphorePermit,
}

impl Connection {
    /// Passes a result on: progress renews the expiry, a wait is bounded by it.
    fn judge<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            let expiry = Instant::now() + self.idle;
            self.expiry.set(sleep_until(expiry));
            return result;
        }
        match self.expiry.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.judge(context, result)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
