//! The predictions of a forest's samples on a context-parallel rank: each prediction that samples share is there once.

use crate::error::{Error, Result};

use super::shard::Shard;

/// No row, no place or no edge.
const NONE: usize = usize::MAX;

/// The rows of a rank, and the predictions that its rows make.
///
/// An *edge* is a prediction that counts in some sample: a row predicts the token that follows it on a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// The token of each row; 0 for padding.
    pub tokens: Vec<i64>,
    /// Number of samples with each row's token; 0 for padding.
    pub sample_counts: Vec<i64>,
    /// For each edge the row that predicts, in the order of the predicted tokens in memory.
    pub rows: Vec<i64>,
    /// For each edge the predicted token.
    pub targets: Vec<i64>,
    /// For each edge the number of samples in which it counts.
    pub weights: Vec<i64>,
    /// The edge of each prediction that counts, sample by sample, in the order of tokens.
    pub sample_edges: Vec<i64>,
    /// The sample of each of these predictions.
    pub samples: Vec<i64>,
    /// The position of the predicted token in its sample.
    pub positions: Vec<i64>,
}

impl Shard {
    /// The rows and predictions of one rank of a forest.
    ///
    /// # Arguments
    /// * `rank` - a rank of the shard.
    /// * `tokens` - tokens of the samples, one sample after the other; further samples of the forest are padding.
    /// * `counts` - for each of these tokens, whether its sample predicts it; never the first token of a sample.
    ///
    /// # Errors
    /// [`Error::Combination`] for a shard of documents; [`Error::Mismatch`] for `counts` of another length, or tokens
    /// that are no whole samples; [`Error::Entry`] if the first token of a sample counts; [`Error::OutOfRange`] for a
    /// rank that does not exist.
    ///
    /// # Complexity
    /// O(tokens of all samples).
    pub fn edges(&self, rank: usize, tokens: &[i64], counts: &[bool]) -> Result<Edges> {
        let Some(forest) = &self.forest else {
            return Err(Error::Combination { argument: "shard", requirement: "is of documents, not of a forest" });
        };
        let expected = tokens.len();
        if counts.len() != expected {
            return Err(Error::Mismatch { argument: "counts", found: counts.len(), other: "tokens", expected });
        }
        // An edge is named by the place of the predicted token, since every token but the first of a root has one
        // token before it.
        let (places, unique) = (forest.token_indices(), self.num_tokens() as usize);
        let place = |token: usize| places[token] as usize;
        let (mut at_place, mut held_by, mut before) = (vec![0; unique], vec![0; unique], vec![NONE; unique]);
        let mut is_learnt = vec![false; unique];
        let mut samples = Vec::new();
        let mut start = 0;
        for length in forest.sample_lengths() {
            if start == expected {
                break;
            }
            let end = start + length as usize;
            if end > expected {
                return Err(Error::Mismatch { argument: "tokens", found: expected, other: "samples", expected: end });
            }
            if counts[start] {
                let requirement = "the first token of a sample is predicted by no token";
                return Err(Error::Entry { argument: "counts", index: start, value: 1.0, requirement });
            }
            for token in start..end {
                at_place[place(token)] = tokens[token];
                held_by[place(token)] += 1;
                is_learnt[place(token)] |= counts[token];
                if token > start {
                    before[place(token)] = place(token - 1);
                }
            }
            samples.push(start..end);
            start = end;
        }
        if start != expected {
            return Err(Error::Mismatch { argument: "tokens", found: expected, other: "samples", expected: start });
        }
        let mut row_of = vec![NONE; unique];
        let held = self.rank(rank)?.token_indices();
        held.iter().enumerate().for_each(|(row, &place)| row_of[place as usize] = row);
        let of_rows = |of_place: &[i64]| held.iter().map(|&place| of_place[place as usize]).collect();
        let mut edges = Edges { tokens: of_rows(&at_place), sample_counts: of_rows(&held_by), ..Edges::default() };
        let mut edge_at = vec![NONE; unique];
        for target in (0..unique).filter(|&place| is_learnt[place]) {
            let row = row_of[before[target]];
            if row != NONE {
                edge_at[target] = edges.rows.len();
                edges.rows.push(row as i64);
                edges.targets.push(at_place[target]);
            }
        }
        edges.weights = vec![0; edges.rows.len()];
        for (sample, range) in samples.into_iter().enumerate() {
            let begin = range.start;
            for token in range.filter(|&token| counts[token] && edge_at[place(token)] != NONE) {
                let edge = edge_at[place(token)];
                edges.weights[edge] += 1;
                edges.sample_edges.push(edge as i64);
                edges.samples.push(sample as i64);
                edges.positions.push((token - begin) as i64);
            }
        }
        Ok(edges)
    }
}
