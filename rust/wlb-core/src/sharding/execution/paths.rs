//! Paths of tokens, which define what queries see, and runs of tokens, which ranks hold.

/// Number of tokens before and after itself that a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Tokens before; [`Reach::UNLIMITED`] for all.
    pub left: i64,
    /// Tokens after; [`Reach::UNLIMITED`] for all.
    pub right: i64,
}

impl Reach {
    /// More tokens than any document has; far from the ends of i64, so that it can be added to.
    pub const UNLIMITED: i64 = 1 << 40;
}

/// Neighbouring tokens of the packed sequence at neighbouring positions of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Position of the first token in the path.
    pub position: i64,
    /// First token, in the packed sequence.
    pub token: i64,
    /// Number of tokens.
    pub length: i64,
}

/// The tokens that queries can see, by position. The pieces of each path follow each other from position 0 on.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    pieces: Vec<Piece>,
    ends: Vec<usize>,
}

impl Paths {
    /// Adds a path and returns its index.
    pub fn push(&mut self, pieces: impl IntoIterator<Item = Piece>) -> usize {
        self.pieces.extend(pieces);
        self.ends.push(self.pieces.len());
        self.ends.len() - 1
    }

    /// The pieces of a path.
    pub fn pieces(&self, path: usize) -> &[Piece] {
        let begin = if path == 0 { 0 } else { self.ends[path - 1] };
        &self.pieces[begin..self.ends[path]]
    }

    /// Number of positions of a path.
    pub fn length(&self, path: usize) -> i64 {
        self.pieces(path).last().map_or(0, |last| last.position + last.length)
    }

    /// The pieces of a path, cut to the positions `from..to`.
    pub fn cut(&self, path: usize, from: i64, to: i64) -> impl Iterator<Item = Piece> {
        let pieces = self.pieces(path);
        let begin = pieces.partition_point(|piece| piece.position + piece.length <= from);
        pieces[begin..].iter().take_while(move |piece| piece.position < to).map(move |piece| {
            let first = piece.position.max(from);
            let last = (piece.position + piece.length).min(to);
            Piece { position: first, token: piece.token + first - piece.position, length: last - first }
        })
    }

    /// Whether every path is one piece.
    pub(super) fn are_single(&self) -> bool {
        self.pieces.len() == self.ends.len()
    }
}

/// Tokens that a rank holds: neighbours in the packed sequence, in a path, and in the rank's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Path whose keys the tokens see.
    pub path: usize,
    /// Position of the first token in the path.
    pub position: i64,
    /// First token, in the packed sequence.
    pub token: i64,
    /// Row of the first token in the rank's tensors.
    pub row: i64,
    /// Number of tokens.
    pub length: i64,
}

impl Run {
    /// The positions of the path that the queries of this run see.
    pub(super) fn sees(&self, paths: &Paths, reach: Reach) -> (i64, i64) {
        let from = (self.position - reach.left).max(0);
        let to = (self.position + self.length + reach.right).min(paths.length(self.path));
        (from, to)
    }
}

/// Number of tokens of a holder.
pub(super) fn tokens(held: &[Run]) -> i64 {
    held.iter().map(|run| run.length).sum()
}
