//! Whether each shard still answers. `[D-38]`
//!
//! Lives on: control. Bound: one ping outstanding per shard.
use iop_proto::ids::{Now, ShardIndex};
use iop_proto::limits::{SHARD_ANSWER_MS, SHARD_PING_MS};

/// How late a deadline may be seen before it says that this process stood still, not the shard.
const STANDSTILL_MS: u64 = SHARD_ANSWER_MS / 5;

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Beat {
    /// The token sent and not answered yet.
    outstanding: Option<u64>,
    /// When the next ping is due, or the outstanding one's answer.
    due: Now,
}

/// What a beat that is due asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Ping {
        token: u64,
    },
    /// Nothing to do; the beat is due again later.
    Wait,
    Wedged,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Pulse {
    beats: Vec<Beat>,
    sent: u64,
    wedged: Option<ShardIndex>,
}

impl Pulse {
    pub(crate) fn new(shards: usize, now: Now) -> Self {
        let due = now.after_ms(SHARD_PING_MS);
        Self {
            beats: (0..shards)
                .map(|_| Beat {
                    outstanding: None,
                    due,
                })
                .collect(),
            sent: 0,
            wedged: None,
        }
    }

    /// The shard's beat is due at `now`. Also says when it is due next.
    pub(crate) fn due(&mut self, shard: ShardIndex, now: Now) -> (Due, Now) {
        let beat = &mut self.beats[shard.row()];
        let answer_due = now.after_ms(SHARD_ANSWER_MS);
        let due = match beat.outstanding {
            None => {
                self.sent += 1;
                let token = token(shard, self.sent);
                beat.outstanding = Some(token);
                Due::Ping { token }
            }
            // A stopped process wakes with every deadline behind it: the shard gets its time again.
            Some(_) if now.ms_since(beat.due) >= STANDSTILL_MS => Due::Wait,
            Some(_) => {
                self.wedged = Some(shard);
                Due::Wedged
            }
        };
        beat.due = answer_due;
        (due, answer_due)
    }

    /// An answer. If it is the outstanding one's: the shard, the beat's old due time and its new.
    pub(crate) fn pong(&mut self, token: u64, now: Now) -> Option<(ShardIndex, Now, Now)> {
        let shard = shard_of(token)?;
        let beat = self.beats.get_mut(shard.row())?;
        if beat.outstanding != Some(token) {
            return None;
        }
        beat.outstanding = None;
        let before = core::mem::replace(&mut beat.due, now.after_ms(SHARD_PING_MS));
        Some((shard, before, beat.due))
    }

    /// The shard was busy with what it was told while nobody could take its answer: it gets its time
    /// again. If an answer is outstanding: the beat's old due time and its new.
    pub(crate) fn heard(&mut self, shard: ShardIndex, now: Now) -> Option<(Now, Now)> {
        let beat = &mut self.beats[shard.row()];
        beat.outstanding?;
        let before = core::mem::replace(&mut beat.due, now.after_ms(SHARD_ANSWER_MS));
        Some((before, beat.due))
    }

    pub(crate) const fn wedged(&self) -> Option<ShardIndex> {
        self.wedged
    }

    /// A shard whose beat is due at `now`, and since when.
    pub(crate) fn first_due(&self, now: Now) -> Option<(ShardIndex, Now)> {
        self.shards().find(|&(_, due)| due <= now)
    }

    pub(crate) fn shards(&self) -> impl Iterator<Item = (ShardIndex, Now)> + '_ {
        self.beats
            .iter()
            .enumerate()
            .filter_map(|(row, beat)| ShardIndex::new(row).map(|shard| (shard, beat.due)))
    }
}

/// The low 8 bits say which shard, so that a ping can be routed by its token alone.
const fn token(shard: ShardIndex, number: u64) -> u64 {
    number << 8 | shard.row() as u64
}

/// The shard a ping goes to.
pub(crate) fn shard_of(token: u64) -> Option<ShardIndex> {
    ShardIndex::new(usize::try_from(token & 0xff).ok()?)
}
