//! Hashes of what may be long.

use crate::interrupt::Meter;

/// Bytes that are hashed at once: few calls, and no second copy of what is hashed.
const AT_ONCE: usize = 1 << 16;
/// Bytes that take about as long as a step of other work.
const BYTES_A_STEP: usize = 4;

/// BLAKE3 of bytes that come bit by bit; can be interrupted.
pub(crate) struct Digest {
    hasher: blake3::Hasher,
    waiting: Vec<u8>,
    meter: Meter,
}

impl Digest {
    pub(crate) fn new() -> Self {
        Self { hasher: blake3::Hasher::new(), waiting: Vec::new(), meter: Meter::default() }
    }

    #[inline]
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
        if self.waiting.len() >= AT_ONCE {
            self.take_in();
        }
    }

    fn take_in(&mut self) {
        self.hasher.update(&self.waiting);
        self.meter.spend(self.waiting.len() / BYTES_A_STEP);
        self.waiting.clear();
    }

    /// In hexadecimal digits.
    pub(crate) fn finish(mut self) -> String {
        self.take_in();
        self.hasher.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::{AT_ONCE, Digest};

    #[test]
    fn parts_are_hashed_as_the_whole() {
        for length in [0, 1, AT_ONCE - 1, AT_ONCE, 3 * AT_ONCE + 5] {
            let bytes: Vec<u8> = (0..length).map(|at| (at * 31 % 251) as u8).collect();
            for part in [1, 7, AT_ONCE, 4 * AT_ONCE] {
                let mut digest = Digest::new();
                bytes.chunks(part).for_each(|part| digest.add(part));
                assert_eq!(digest.finish(), blake3::hash(&bytes).to_hex().to_string());
            }
        }
    }
}
