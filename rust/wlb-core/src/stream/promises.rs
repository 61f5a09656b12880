//! When a packer notes that documents wait to which less is promised than to those of an empty packer.

use super::bounds::{Bounds, placed_within};
use super::changed::Changed;
use super::config::Release;
use super::packer::Packer;
use super::queue::Waiting;

impl Packer {
    /// Notes that all that waits came under other rules. Nothing to note where nothing waits, or where no delay is
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

    /// Whether queues let more go into a step than they do where each push brings what is admitted.
    pub(super) fn exceeds_admission(&self, pieces: &[Waiting]) -> bool {
        let brought = || pieces.iter().any(|waiting| waiting.arrived == self.iteration);
        // A sum of costs may be rounded up.
        let rounding = self.config.limits.as_ref().map_or(0, Vec::len) as i64;
        let most = Bounds::steady_load(&self.config).saturating_add(rounding);
        self.config.release == Release::Fifo && self.load_of(pieces) > most && brought()
    }

    /// After a step: notes if more came than is admitted, and forgets a change before which none that waits came.
    pub(super) fn update_change(&mut self, exceeded_admission: bool) {
        let at = self.changed.map_or(0, |changed| changed.at);
        let is_over = match self.config.release {
            Release::Fifo => exceeded_admission,
            // What fits by itself when it enters is never carried over.
            Release::Adaptive => self.carried.iter().any(|waiting| waiting.arrived >= at),
        };
        if is_over {
            self.note_change();
        } else if !self.waiting().any(|waiting| waiting.arrived < at) {
            self.changed = None;
        }
    }
}
