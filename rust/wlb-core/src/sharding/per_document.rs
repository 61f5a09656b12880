//! Cuts every document into chunks: equal tokens and (almost) equal pairs on all ranks, without padding.

use crate::longest_first::longest_first_of;

use super::builder::{Ranks, owner};

/// Cuts every document into `2*cp` chunks; tokens left over lengthen some chunks by one token each.
///
/// A cursor over the chunk slots decides which chunks are lengthened. It goes on from document to document, longest
/// first, so that every slot gets `total / (2*cp)` tokens, give or take one. Ranks have equal pairs if `2*cp` divides
/// every length. Otherwise they differ by at most `2 * sum(d)` over the documents whose length it does not divide, and
/// also by at most `2 * d_max` for each time that the cursor goes round. (The paper's bound of `2 * d_max` leaves that
/// out: `[9, 7, 9]` at `cp = 8` differs by 19.) Beside long documents this is negligible; it is not for hundreds of
/// documents of about `2*cp` tokens and nothing else.
pub(super) fn cut(ranks: &mut impl Ranks, lengths: &[i32]) {
    let cursors = cursors(lengths, ranks.cp_size(), 0..lengths.len());
    for (document, (&length, &cursor)) in lengths.iter().zip(&cursors).enumerate() {
        cut_document(ranks, document, length, cursor);
    }
}

/// First slot that is lengthened for each of `documents`; 0 for all others.
pub(super) fn cursors(lengths: &[i32], cp_size: usize, documents: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut cursors = vec![0; lengths.len()];
    let mut cursor = Cursor::new(cp_size);
    for (length, document) in longest_first_of(documents.map(|document| (document, lengths[document]))) {
        cursors[document] = cursor.step(length);
    }
    cursors
}

/// The next slot to lengthen, while documents come longest first.
pub(crate) struct Cursor {
    slots: u32,
    slot: u32,
}

impl Cursor {
    pub(crate) fn new(cp_size: usize) -> Self {
        Self { slots: 2 * cp_size as u32, slot: 0 }
    }

    /// First slot to lengthen for this document; the next document continues after its last one.
    #[inline]
    pub(crate) fn step(&mut self, length: i32) -> u32 {
        let slot = self.slot;
        self.slot += length as u32 % self.slots;
        if self.slot >= self.slots {
            self.slot -= self.slots;
        }
        slot
    }
}

/// Pushes the chunks of one document; `length % (2*cp)` of them, from slot `cursor` on, are one token longer.
#[inline]
pub(crate) fn cut_document(ranks: &mut impl Ranks, document: usize, length: i32, cursor: u32) {
    let cp_size = ranks.cp_size();
    let slots = 2 * cp_size as u32;
    let (base, longer) = (length as u32 / slots, length as u32 % slots);
    let mut start = 0;
    for slot in 0..slots {
        // Distance from the cursor, wrapping around.
        let distance = if slot >= cursor { slot - cursor } else { slot + slots - cursor };
        let size = (base + u32::from(distance < longer)) as i32;
        ranks.push(owner(slot as usize, cp_size), document, start, size);
        start += size;
    }
}
