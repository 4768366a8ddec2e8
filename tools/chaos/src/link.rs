//! A link: a relay whose troubles are ordered, and a pair of virtual interfaces that lose packets for
//! it where the host has network namespaces.
//!
//! Lives on: the harness; a task per connection. View: bytes. Bound: `PIECE_BYTES` in each direction of
//! a connection; the kernel holds the rest.
//!
//! With interfaces, silence is packets that do not arrive. Without, it is a relay that reads no more:
//! for the two ends much the same, but the kernel in between still acknowledges.
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::mem::replace;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::error::Error;
use crate::network::Pair;
use crate::plan::Trouble;

const PIECE_BYTES: usize = 64 * 1024;
/// Pieces with less between them are of one sending.
const AT_ONCE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    away_blocked: bool,
    back_blocked: bool,
    late_ms: u32,
    /// Counts orders: every connection that sees the number change obeys.
    cuts: u64,
    half_closes: u64,
}

/// From a node's side to whatever it calls.
#[derive(Debug)]
pub(crate) struct Relay {
    state: watch::Sender<State>,
    pair: Option<Pair>,
    /// Something is at work on its interfaces: no second silence meanwhile.
    busy: Cell<bool>,
    /// Where the node connects.
    pub(crate) address: SocketAddr,
}

impl Relay {
    /// Listens on `address` and connects to `target`, for as long as the harness lives.
    pub(crate) async fn start(
        address: SocketAddr,
        target: SocketAddr,
        pair: Option<Pair>,
    ) -> Result<Self, Error> {
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(Error::io(format!("listen on {address}")))?;
        let address = listener.local_addr().map_err(Error::io("a relay"))?;
        let (state, seen) = watch::channel(State::default());
        tokio::task::spawn_local(async move {
            loop {
                // Out of descriptors, the next connection waits for one that ends.
                let Ok((near, _)) = listener.accept().await else {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                let seen = seen.clone();
                tokio::task::spawn_local(async move {
                    let _broken = connection(near, target, seen).await; // both ends see it
                });
            }
        });
        Ok(Self {
            state,
            pair,
            busy: Cell::new(false),
            address,
        })
    }

    /// Gives the link its trouble for `ms`, then takes it away again. `false`: it is silent already.
    pub(crate) async fn trouble(&self, trouble: Trouble, ms: u32) -> Result<bool, Error> {
        let is_silence = matches!(
            trouble,
            Trouble::Silent | Trouble::DeafAway | Trouble::DeafBack
        );
        if is_silence && self.busy.replace(true) {
            return Ok(false);
        }
        self.set(trouble, true).await?;
        tokio::time::sleep(Duration::from_millis(u64::from(ms))).await;
        self.set(trouble, false).await?;
        if is_silence {
            self.busy.set(false);
        }
        Ok(true)
    }

    async fn set(&self, trouble: Trouble, on: bool) -> Result<(), Error> {
        if let Some(pair) = &self.pair {
            match trouble {
                Trouble::Silent => return pair.carry(!on).await,
                Trouble::DeafAway => return pair.away(!on).await,
                Trouble::DeafBack => return pair.back(!on).await,
                Trouble::Cut | Trouble::HalfClosed | Trouble::Late(_) => {}
            }
        }
        self.state.send_modify(|state| match trouble {
            Trouble::Silent => {
                state.away_blocked = on;
                state.back_blocked = on;
            }
            Trouble::DeafAway => state.away_blocked = on,
            Trouble::DeafBack => state.back_blocked = on,
            Trouble::Cut => state.cuts += u64::from(on),
            Trouble::HalfClosed => state.half_closes += u64::from(on),
            Trouble::Late(ms) if on => state.late_ms += ms, // two at once are both felt
            Trouble::Late(ms) => state.late_ms -= ms,
        });
        Ok(())
    }
}

async fn connection(
    mut near: TcpStream,
    target: SocketAddr,
    mut seen: watch::Receiver<State>,
) -> io::Result<()> {
    near.set_nodelay(true)?;
    let begun = *seen.borrow();
    // What was dialled in silence arrives when it is over.
    let open = |state: &State| !state.away_blocked && !state.back_blocked;
    drop(seen.wait_for(open).await); // it locks the state while it lives
    let mut far = TcpStream::connect(target).await?;
    far.set_nodelay(true)?;
    let mut orders = seen.clone();
    let was_cut = {
        let (near_read, near_write) = near.split();
        let (far_read, far_write) = far.split();
        let away = pump(
            near_read,
            far_write,
            seen.clone(),
            |state| state.away_blocked,
            Some(begun.half_closes),
        );
        let back = pump(far_read, near_write, seen, |state| state.back_blocked, None);
        tokio::select! {
            _ended = both(away, back) => false,
            _ordered = orders.wait_for(|state| state.cuts != begun.cuts) => true,
        }
    };
    if was_cut {
        near.set_zero_linger()?;
        far.set_zero_linger()?;
    }
    Ok(())
}

/// Until both have come to their end, or one breaks.
async fn both(
    away: impl Future<Output = io::Result<()>>,
    back: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    tokio::try_join!(away, back).map(|((), ())| ())
}

/// `half_closes`: so many orders to close this direction had been given when the connection began.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut seen: watch::Receiver<State>,
    is_blocked: fn(&State) -> bool,
    half_closes: Option<u64>,
) -> io::Result<()> {
    let begun = half_closes.unwrap_or_default();
    let mut orders = seen.clone();
    let mut bytes = vec![0; PIECE_BYTES];
    let mut is_first = true;
    loop {
        let asked = Instant::now();
        let length = tokio::select! {
            read = from.read(&mut bytes) => read?,
            _ordered = orders.wait_for(|state| state.half_closes != begun), if half_closes.is_some() => 0,
        };
        let passes = seen.wait_for(|state| !is_blocked(state)).await;
        let late_ms = passes.map_or(0, |state| state.late_ms);
        // What follows at once was on its way meanwhile: a late link is not a narrow one.
        let begins = replace(&mut is_first, false) || asked.elapsed() > AT_ONCE;
        if late_ms > 0 && begins {
            tokio::time::sleep(Duration::from_millis(u64::from(late_ms))).await;
        }
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&bytes[..length]).await?;
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    const SHORT: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(20);

    async fn pair() -> (Rc<Relay>, TcpStream, TcpStream) {
        let far = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let relay = Relay::start(any, far.local_addr().unwrap(), None)
            .await
            .unwrap();
        let near = TcpStream::connect(relay.address).await.unwrap();
        let (far, _) = far.accept().await.unwrap();
        (Rc::new(relay), near, far)
    }

    fn block_on(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, test);
    }

    async fn reads(stream: &mut TcpStream) -> Option<io::Result<u8>> {
        tokio::time::timeout(SHORT, stream.read_u8()).await.ok()
    }

    /// A byte that comes, and must.
    async fn byte(stream: &mut TcpStream) -> io::Result<u8> {
        tokio::time::timeout(LONG, stream.read_u8()).await.unwrap()
    }

    #[test]
    fn silence_holds_what_is_sent_and_lets_it_go() {
        block_on(async {
            let (relay, mut near, mut far) = pair().await;
            near.write_all(b"a").await.unwrap();
            assert_eq!(byte(&mut far).await.unwrap(), b'a');
            relay.set(Trouble::DeafAway, true).await.unwrap();
            near.write_all(b"b").await.unwrap();
            far.write_all(b"c").await.unwrap();
            assert_eq!(byte(&mut near).await.unwrap(), b'c');
            assert!(reads(&mut far).await.is_none());
            relay.set(Trouble::DeafAway, false).await.unwrap();
            assert_eq!(byte(&mut far).await.unwrap(), b'b');
        });
    }

    #[test]
    fn a_late_link_is_not_a_narrow_one() {
        const BYTES: usize = 64 * PIECE_BYTES;
        block_on(async {
            let (relay, mut near, mut far) = pair().await;
            relay.set(Trouble::Late(200), true).await.unwrap();
            let began = Instant::now();
            let sent = async { near.write_all(&vec![7; BYTES]).await };
            let mut bytes = vec![0; BYTES];
            let both = async { tokio::try_join!(sent, far.read_exact(&mut bytes)) };
            tokio::time::timeout(LONG, both).await.unwrap().unwrap();
            let took = began.elapsed();
            assert!(took >= SHORT, "late at all: {took:?}");
            assert!(took < SHORT * 32, "{took:?} for 64 pieces");
        });
    }

    #[test]
    fn a_cut_resets_both_ends_and_a_half_close_one_way() {
        block_on(async {
            let (relay, mut near, mut far) = pair().await;
            relay.set(Trouble::HalfClosed, true).await.unwrap();
            let end = byte(&mut far).await.unwrap_err();
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
            far.write_all(b"c").await.unwrap();
            assert_eq!(byte(&mut near).await.unwrap(), b'c');
            let (relay, mut near, mut far) = pair().await;
            relay.set(Trouble::Cut, true).await.unwrap();
            for end in [&mut near, &mut far] {
                let error = byte(end).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            }
        });
    }
}
