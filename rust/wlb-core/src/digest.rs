//! Hashes of data that may be long.

use std::io::{self, Write};

use serde::Serialize;

/// Bytes that are hashed in one call: few calls, and no second copy of the data.
const AT_ONCE: usize = 1 << 16;

/// BLAKE3 of bytes that arrive in small portions.
pub(crate) struct Digest {
    hasher: blake3::Hasher,
    waiting: Vec<u8>,
}

impl Digest {
    pub(crate) fn new() -> Self {
        Self { hasher: blake3::Hasher::new(), waiting: Vec::new() }
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
        self.waiting.clear();
    }

    /// Digest of a value as JSON, without building the whole text.
    pub(crate) fn of_json(value: &impl Serialize) -> String {
        let mut digest = Self::new();
        // Writing to a hash cannot fail, and every value hashed here can be serialised.
        let _ = serde_json::to_writer(&mut digest, value);
        digest.finish()
    }

    /// The digest in hexadecimal digits.
    pub(crate) fn finish(mut self) -> String {
        self.take_in();
        self.hasher.finalize().to_hex().to_string()
    }
}

impl Write for Digest {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.add(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
