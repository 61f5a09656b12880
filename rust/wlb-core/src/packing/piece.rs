//! A document, or a part of one.

use serde::{Deserialize, Serialize};

/// A document, or the part of it that lies in one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(i64, i32, i32)", into = "(i64, i32, i32)")]
pub struct Piece {
    /// Id of the document.
    pub id: i64,
    /// Position of the first token inside the document.
    pub start: i32,
    /// Number of tokens.
    pub length: i32,
}

impl Piece {
    /// All of document `index` of a batch.
    #[inline]
    pub(crate) fn whole(index: usize, length: i32) -> Self {
        Self { id: index as i64, start: 0, length }
    }
}

impl From<(i64, i32, i32)> for Piece {
    fn from((id, start, length): (i64, i32, i32)) -> Self {
        Self { id, start, length }
    }
}

impl From<Piece> for (i64, i32, i32) {
    fn from(piece: Piece) -> Self {
        (piece.id, piece.start, piece.length)
    }
}
