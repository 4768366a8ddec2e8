//! What a client is sent: flushing, waiting sends, and what follows once an answer is in the socket.
//!
//! Lives on: the client's shard. Bound: pending output of the output pool; one send per socket.
use std::os::fd::AsRawFd;

use iop_proto::limits::DRAIN_MS_MAX;
use iop_proto::reason::Reason;

use super::client::Phase;
use super::send::{SendError, Sender, Socket};
use super::uring::{Kind, Token};
use super::{Shard, slot_of};
use crate::tls::record::ReplyBuf;

impl Shard {
    pub(super) fn client_dirty(&mut self, row: usize) {
        let client = &mut self.clients[row];
        if !client.in_dirty {
            client.in_dirty = true;
            self.dirty_clients.push(slot_of(row));
        }
    }

    fn socket(&self, row: usize) -> Option<Socket> {
        let client = &self.clients[row];
        Some(Socket {
            slot: slot_of(row),
            generation: client.generation,
            fd: client.fd.as_ref()?.as_raw_fd(),
        })
    }

    /// Sends what this turn gathered for the client, and ends its answer if that is complete.
    pub(super) fn flush_client(&mut self, row: usize) {
        let Some(socket) = self.socket(row) else {
            return;
        };
        let client = &mut self.clients[row];
        if client.phase == Phase::Closing {
            return;
        }
        let bytes = self.sender.gathered(&client.output);
        self.make_room(bytes);
        let client = &mut self.clients[row];
        if client.phase == Phase::Closing {
            return; // it held most of the pool itself
        }
        let last = std::mem::take(&mut client.ended);
        let flushed = self.sender.flush(
            &mut self.ring,
            &mut client.output,
            client.records.as_mut(),
            socket,
            client.framing,
            last,
        );
        // A direct send that succeeds completes without a word: what waits for it must not wait for the
        // next completion of somebody else.
        let grants = matches!(client.phase, Phase::Running { run }
            if self.runs[run as usize].window.is_due());
        let waits = !client.output.pending.is_empty() || client.phase == Phase::Flushing || grants;
        self.settle_soon |= client.output.is_direct() && waits;
        match flushed {
            Ok(()) => self.arm_client_send(row),
            Err(error) => self.client_send_failed(row, error),
        }
    }

    pub(super) fn arm_client_send(&mut self, row: usize) {
        let Some(socket) = self.socket(row) else {
            return;
        };
        let client = &mut self.clients[row];
        if client.phase == Phase::Closing {
            return;
        }
        if self.sender.arm(&mut self.ring, &mut client.output, socket) {
            client.operations += 1;
        }
        if client.output.is_idle() && !client.ended {
            self.output_idle(row);
        }
    }

    /// The waiting send completed.
    pub(super) fn client_sent(&mut self, row: usize, result: i32) {
        let client = &mut self.clients[row];
        client.operations -= 1;
        let whole = self.sender.sent(&mut client.output, result);
        if client.phase == Phase::Closing {
            self.try_free_client(row);
        } else if whole {
            self.renew_window(row);
            self.arm_client_send(row);
        } else {
            self.client_gone(row);
        }
    }

    /// A direct send fell short: `result` bytes, or an error.
    pub(super) fn client_direct_short(&mut self, gather: usize, result: i32) {
        let (slot, generation) = self.sender.client_of(gather);
        let row = slot as usize;
        if self.clients[row].generation != generation {
            return;
        }
        let taken = match usize::try_from(result) {
            Ok(taken) => taken,
            Err(_) if -result == libc::EAGAIN || -result == libc::EINTR => 0,
            Err(_) => {
                Sender::direct_settled(&mut self.clients[row].output);
                self.client_gone(row);
                return;
            }
        };
        self.make_room(self.sender.bytes_of_gather(gather));
        let client = &mut self.clients[row];
        if client.phase != Phase::Closing
            && let Err(error) = self.sender.keep_rest(gather, &mut client.output, taken)
        {
            self.client_send_failed(row, error);
        }
    }

    /// The direct send of gather `gather` has settled.
    pub(super) fn client_direct_settled(&mut self, gather: usize) {
        let (slot, generation) = self.sender.client_of(gather);
        let row = slot as usize;
        let client = &mut self.clients[row];
        if client.generation != generation || !client.output.is_direct() {
            return;
        }
        Sender::direct_settled(&mut client.output);
        if client.phase == Phase::Closing {
            self.try_free_client(row);
        } else {
            self.renew_window(row);
            self.arm_client_send(row);
        }
    }

    pub(super) fn client_send_failed(&mut self, row: usize, error: SendError) {
        match error {
            SendError::Dry => self.client_ends(row, Reason::OutputPoolFull),
            SendError::Tls(_) => self.client_ends(row, Reason::ClientGone),
        }
    }

    /// Everything for the client is in its socket.
    fn output_idle(&mut self, row: usize) {
        match self.clients[row].phase {
            Phase::Flushing => self.answer_delivered(row),
            Phase::Leaving { .. } => self.try_leave(row),
            Phase::Draining => {
                if let Some(fd) = &self.clients[row].fd {
                    super::uring::shutdown_write(fd);
                }
            }
            _ => {}
        }
    }

    fn answer_delivered(&mut self, row: usize) {
        self.log_access(row);
        let client = &self.clients[row];
        if client.asked.keep_alive && !client.input_closed {
            self.next_request(row);
        } else {
            self.drain_client(row);
        }
    }

    /// The connection is over once the peer has seen our end: nothing of an answer is lost to a reset.
    pub(super) fn drain_client(&mut self, row: usize) {
        self.drop_request(row);
        let client = &mut self.clients[row];
        if client.input_closed {
            self.close_client(row, false);
            return;
        }
        client.phase = Phase::Draining;
        client.deadline = Some(self.now.after_ms(u64::from(DRAIN_MS_MAX)));
        self.early.clear(&mut client.early);
        self.end_tls(row);
        self.wake_input(row);
        if self.clients[row].output.is_idle() {
            self.output_idle(row);
        }
    }

    /// Our last record of a TLS connection: a reader can tell the end from a cut.
    fn end_tls(&mut self, row: usize) {
        let client = &mut self.clients[row];
        let mut reply = ReplyBuf::default();
        let Some(records) = &mut client.records else {
            return;
        };
        if records.close_notify(&mut reply).is_ok() {
            // A dry pool loses it; the FIN that follows says less.
            let pending = &mut client.output.pending;
            let _lost = self.sender.pool.append(pending, reply.as_slice());
            self.client_dirty(row);
        }
    }

    /// Back to reading after a phase that only polled.
    fn wake_input(&mut self, row: usize) {
        let client = &self.clients[row];
        if client.polling {
            self.ring.cancel(Token::new(
                Kind::ClientHangup,
                slot_of(row),
                client.generation,
            ));
        } else {
            self.arm_client_input(row);
        }
    }

    fn next_request(&mut self, row: usize) {
        self.drop_request(row);
        let deadline = self.now.after_ms(self.config.timeouts.keep_alive_ms);
        let client = &mut self.clients[row];
        client.phase = Phase::Head;
        client.deadline = Some(deadline);
        client.plan = None;
        client.first_byte = None;
        client.provider = None;
        client.reason = None;
        client.status = 0;
        client.body_bytes_in = 0;
        client.body_bytes_out = 0;
        let mut early = client.early.take();
        while !early.is_empty() {
            // Copied out so that the connection may put its rest back while it is read.
            let front = self.early.front(&early);
            let length = front.len();
            let Some(block) = self.carry.take() else {
                self.early.clear(&mut early);
                self.client_gone(row);
                return;
            };
            block[..length].copy_from_slice(front);
            self.early.consume(&mut early, length);
            self.client_bytes(row, &block[..length]);
            self.carry.give(block);
        }
        self.wake_input(row);
    }
}
