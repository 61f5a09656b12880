//! Masks: the keys that a query attends to, and the number of pairs.

use serde::{Deserialize, Serialize};

/// The keys of its own document that a query attends to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Itself and all before it (language models).
    #[default]
    Causal,
    /// All of them (encoders, video models).
    Full,
}

impl Mask {
    /// (query, key) pairs of a whole document of `length` tokens: `d(d+1)/2` or `d*d`.
    #[inline]
    pub fn pairs(self, length: i32) -> u64 {
        let d = length as u64;
        match self {
            Self::Causal => d * (d + 1) / 2,
            Self::Full => d * d,
        }
    }

    /// [`Mask::pairs`] rounded to a float, in a form that vectorises. Equal to rounding the exact count: the product is
    /// rounded once, and halving is exact.
    #[inline]
    pub fn pairs_f64(self, length: i32) -> f64 {
        let d = f64::from(length);
        match self {
            Self::Causal => d * (d + 1.0) * 0.5,
            Self::Full => d * d,
        }
    }

    /// Pairs of the `length` queries from `start` on, in a document of `document_length` tokens.
    ///
    /// Causal: `l*s + l(l+1)/2`. Exact: at most 2^62.
    #[inline]
    pub fn segment_pairs(self, start: i32, length: i32, document_length: i32) -> u64 {
        let (s, l) = (start as u64, length as u64);
        match self {
            Self::Causal => l * s + l * (l + 1) / 2,
            Self::Full => l * document_length as u64,
        }
    }
}

/// Masks of windowed and chunked attention: causal masks that hide some earlier keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalMask {
    /// A query sees itself and the tokens before it, this many keys in all.
    Window(i32),
    /// The document is cut into chunks of this many tokens; a query sees itself and the tokens before it in its chunk.
    Chunk(i32),
}

impl LocalMask {
    /// (query, key) pairs of a whole document of `length` tokens. Exact: at most 2^62.
    ///
    /// The first `length` queries of a longer document have as many pairs.
    #[inline]
    pub fn pairs(self, length: i32) -> u64 {
        let d = length as u64;
        match self {
            Self::Window(size) => {
                // A query of the first window sees one key more than the query before it; all later queries see `m`
                // keys.
                let m = d.min(size as u64);
                m * (2 * d - m + 1) / 2
            }
            Self::Chunk(size) => {
                let c = size as u64;
                let (chunks, rest) = (d / c, d % c);
                chunks * (c * (c + 1) / 2) + rest * (rest + 1) / 2
            }
        }
    }

    /// [`LocalMask::pairs`] rounded to a float.
    #[inline]
    pub fn pairs_f64(self, length: i32) -> f64 {
        match self {
            // This form vectorises. It equals the exact count rounded: the product is rounded once, and halving is
            // exact.
            Self::Window(size) => {
                let d = f64::from(length);
                let m = f64::from(length.min(size));
                m * (2.0 * d - m + 1.0) * 0.5
            }
            Self::Chunk(_) => self.pairs(length) as f64,
        }
    }

    /// Pairs of the `length` queries from `start` on, in a document that has at least `start + length` tokens.
    #[inline]
    pub fn segment_pairs(self, start: i32, length: i32) -> u64 {
        self.pairs(start + length) - self.pairs(start)
    }
}
