//! Records since when documents wait to which the bounds of an empty packer do not apply.

use super::bounds::{Bounds, placed_within};
use super::changed::Changed;
use super::config::Release;
use super::packer::Packer;
use super::queue::Waiting;

impl Packer {
    /// Records that all waiting documents came under other rules. Nothing is recorded if none waits, or if no delay is
    /// promised.
    pub(super) fn note_change(&mut self) {
        let of_queue = match Bounds::queue_delay(&self.config) {
            Some(delay) if self.pending() > 0 => delay,
            _ => {
                self.changed = None;
                return;
            }
        };
        let placed_within = placed_within(self.pending_load(), self.config.capacity());
        self.changed = Some(Changed {
            at: self.iteration,
            delay: self.oldest_wait().max(of_queue).saturating_add(placed_within),
            until: self.iteration.saturating_add(of_queue).saturating_add(placed_within).saturating_add(1),
        });
    }

    /// Whether the queues release more in this step than they could if every push brought only what is admitted, and
    /// documents were pushed in it. New documents that stay in a queue count too: they become due after all that is
    /// carried.
    pub(super) fn exceeds_admission(&self, pieces: &[Waiting]) -> bool {
        let in_queues = self.queue.levels().iter().flatten();
        let brought = || pieces.iter().chain(in_queues).any(|waiting| waiting.arrived == self.iteration);
        // Each sum of costs may be rounded up by one token.
        let rounding = self.config.limits.as_ref().map_or(0, Vec::len) as i64;
        let most = Bounds::steady_load(&self.config).saturating_add(rounding);
        self.config.release == Release::Fifo && self.load_of(pieces) > most && brought()
    }

    /// After a step: records that more came than was admitted, or forgets a change if no document from before it waits.
    pub(super) fn update_change(&mut self, exceeded_admission: bool) {
        let at = self.changed.map_or(0, |changed| changed.at);
        let is_over = match self.config.release {
            Release::Fifo => exceeded_admission,
            // A push that fits into a step by itself is never carried over.
            Release::Adaptive => self.carried.iter().any(|waiting| waiting.arrived >= at),
        };
        if is_over {
            self.note_change();
        } else if !self.waiting().any(|waiting| waiting.arrived < at) {
            self.changed = None;
        }
    }
}
