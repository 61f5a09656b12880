//! A cost model: the cost of documents of any length.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::lengths::Lengths;
use crate::limits::MAX_MICRO_BATCHES;

use super::curve::{Curve, check_rate};
use super::mask::{LocalMask, Mask};
use super::rates::{Rates, Unit, check_local, hides_nothing};

/// Cost of documents: `W(d) = W_a(d) + W_l(d) + document`, where attention `W_a` grows with the pairs and `W_l` with
/// the tokens. Every micro-batch costs a constant besides.
///
/// The cost never decreases with the length. `W_a` and `W_l` are 0 at length 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    attention: Curve,
    linear: Curve,
    mask: Mask,
    // A rate of 0 is left out of the JSON.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    windows: Vec<(i32, f64)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    chunks: Vec<(i32, f64)>,
    #[serde(default, skip_serializing_if = "is_zero")]
    document: f64,
    #[serde(default, skip_serializing_if = "is_zero")]
    micro_batch: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unit: Option<Unit>,
}

fn is_zero(rate: &f64) -> bool {
    *rate == 0.0
}

impl CostModel {
    /// `attention * pairs(d) + linear * d`.
    ///
    /// # Arguments
    /// * `attention`, `linear` - cost of a (query, key) pair and of a token, both in seconds or both in any other unit.
    ///
    /// # Errors
    /// [`Error::Number`] when a rate is negative or not finite, or both are zero.
    ///
    /// # Example
    /// ```
    /// use wlb_core::{CostModel, Mask};
    ///
    /// let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
    /// // Ten tokens attend to 10 * 11 / 2 pairs.
    /// assert_eq!(cost.cost(10), 55.0 + 1000.0);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn analytic(attention: f64, linear: f64, mask: Mask) -> Result<Self> {
        Self::from_rates(&Rates { attention, linear, mask, ..Rates::default() })
    }

    /// The sum of the terms that have a rate.
    ///
    /// # Errors
    /// [`Error::Number`] or [`Error::Entry`] when a rate is negative or not finite, or no document costs anything;
    /// [`Error::OutOfRange`], [`Error::Entry`] or [`Error::Combination`] for a window or chunk that makes no sense.
    ///
    /// # Example
    /// ```
    /// use wlb_core::CostModel;
    /// use wlb_core::cost::Rates;
    ///
    /// let rates = Rates { linear: 100.0, windows: vec![(4, 1.0)], document: 7.0, ..Rates::default() };
    /// let cost = CostModel::from_rates(&rates)?;
    /// // The first four tokens see 1, 2, 3 and 4 keys, the other six see 4 each.
    /// assert_eq!(cost.cost(10), 34.0 + 1000.0 + 7.0);
    /// # Ok::<(), wlb_core::Error>(())
    /// ```
    pub fn from_rates(rates: &Rates) -> Result<Self> {
        check_local("windows", &rates.windows, rates.mask)?;
        check_local("chunks", &rates.chunks, rates.mask)?;
        check_rate("attention", rates.attention)?;
        // Adding zero turns -0.0 into 0.0, so that equal models have equal hashes and fingerprints.
        let mut attention = rates.attention + 0.0;
        let mut terms = |of: &[(i32, f64)]| {
            let priced = of.iter().copied().filter(|&(_, rate)| rate > 0.0);
            let (whole, local): (Vec<_>, Vec<_>) = priced.partition(|&(size, _)| hides_nothing(size));
            whole.iter().for_each(|(_, rate)| attention += rate);
            local
        };
        let (windows, chunks) = (terms(&rates.windows), terms(&rates.chunks));
        let model = Self {
            windows,
            chunks,
            document: rates.document + 0.0,
            micro_batch: rates.micro_batch + 0.0,
            unit: rates.unit,
            ..Self::plain(Curve::Rate(attention), Curve::Rate(rates.linear + 0.0), rates.mask)
        };
        model.check()?;
        Ok(model)
    }

    fn plain(attention: Curve, linear: Curve, mask: Mask) -> Self {
        let (windows, chunks) = (Vec::new(), Vec::new());
        Self { attention, linear, mask, windows, chunks, document: 0.0, micro_batch: 0.0, unit: None }
    }

    /// Cost from times measured at some document lengths.
    ///
    /// # Arguments
    /// * `lengths` - tokens, strictly ascending.
    /// * `attention`, `linear` - cost of one document of that length, above zero and never decreasing.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Entry`] or [`Error::Combination`] naming what does not fit.
    pub fn from_tables(lengths: &Lengths, attention: &[f64], linear: &[f64], mask: Mask) -> Result<Self> {
        for (argument, table) in [("attention_seconds", attention), ("linear_seconds", linear)] {
            if table.len() != lengths.len() {
                let (found, expected) = (table.len(), lengths.len());
                return Err(Error::Mismatch { argument, found, other: "lengths", expected });
            }
        }
        if let Some(index) = (1..lengths.len()).find(|&index| lengths[index] <= lengths[index - 1]) {
            let value = f64::from(lengths[index]);
            return Err(Error::Entry { argument: "lengths", index, value, requirement: "must ascend" });
        }
        let attention = lengths.iter().map(|&d| mask.pairs_f64(d)).zip(attention.iter().copied()).collect();
        let linear = lengths.iter().map(|&d| f64::from(d)).zip(linear.iter().copied()).collect();
        let model = Self::plain(Curve::Table(attention), Curve::Table(linear), mask);
        model.attention.check("attention_seconds")?;
        model.linear.check("linear_seconds")?;
        Ok(model)
    }

    /// Cost from two curves; refused if a cost is infinite or negative.
    pub(crate) fn from_curves(attention: Curve, linear: Curve, mask: Mask) -> Result<Self> {
        let model = Self::plain(attention, linear, mask);
        model.check()?;
        Ok(model)
    }

    /// The model as JSON, for pickles and checkpoints.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The model that [`CostModel::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::Profile`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        let model: Self = crate::error::from_json(json).map_err(|(path, problem)| Error::Profile { path, problem })?;
        model.check()?;
        Ok(model)
    }

    /// The mask: the keys that a query attends to.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// Unit of the costs; measured tables are in seconds.
    pub fn unit(&self) -> Option<Unit> {
        // Tables have no field for a unit, since profiles are always in seconds.
        if self.rates().is_none() { Some(Unit::Seconds) } else { self.unit }
    }

    /// Cost of every document besides the cost of its length.
    pub fn document(&self) -> f64 {
        self.document
    }

    /// Cost of every micro-batch besides its documents; an empty one has this cost, too.
    pub fn micro_batch(&self) -> f64 {
        self.micro_batch
    }

    /// The rates, unless they are measured tables.
    pub fn rates(&self) -> Option<Rates> {
        let (&Curve::Rate(attention), &Curve::Rate(linear)) = (&self.attention, &self.linear) else { return None };
        let Self { mask, document, micro_batch, unit, .. } = *self;
        let (windows, chunks) = (self.windows.clone(), self.chunks.clone());
        Some(Rates { attention, linear, mask, windows, chunks, document, micro_batch, unit })
    }

    /// Rates that are not 0, by name: pairs of all kinds, tokens, documents, micro-batches. `None` for measured tables.
    pub fn terms(&self) -> Option<Vec<(String, f64)>> {
        let Rates { attention, linear, windows, chunks, document, micro_batch, .. } = self.rates()?;
        let mut terms = vec![("pairs".to_owned(), attention)];
        terms.extend(windows.into_iter().map(|(size, rate)| (format!("window_pairs[{size}]"), rate)));
        terms.extend(chunks.into_iter().map(|(size, rate)| (format!("chunk_pairs[{size}]"), rate)));
        let rest = [("tokens", linear), ("documents", document), ("micro_batches", micro_batch)];
        terms.extend(rest.map(|(name, rate)| (name.to_owned(), rate)));
        terms.retain(|&(_, rate)| rate != 0.0);
        Some(terms)
    }

    /// Cost of one document.
    #[inline]
    pub fn cost(&self, length: i32) -> f64 {
        self.attention_cost(length) + self.linear_cost(length) + self.document
    }

    /// The part of [`CostModel::cost`] that depends on the pairs.
    #[inline]
    pub fn attention_cost(&self, length: i32) -> f64 {
        let full = self.attention.at(self.mask.pairs_f64(length));
        self.local_terms().fold(full, |sum, (mask, rate)| sum + rate * mask.pairs_f64(length))
    }

    /// The part of [`CostModel::cost`] that depends on the tokens.
    #[inline]
    pub fn linear_cost(&self, length: i32) -> f64 {
        self.linear.at(f64::from(length))
    }

    fn local_terms(&self) -> impl Iterator<Item = (LocalMask, f64)> {
        let windows = self.windows.iter().map(|&(size, rate)| (LocalMask::Window(size), rate));
        windows.chain(self.chunks.iter().map(|&(size, rate)| (LocalMask::Chunk(size), rate)))
    }

    /// Cost of each document.
    ///
    /// # Complexity
    /// O(n) for each term, vectorised for rates; O(n log k) for a table of `k` knots.
    pub fn costs(&self, lengths: &[i32]) -> Vec<f64> {
        let document = self.document;
        match (&self.attention, &self.linear, self.mask) {
            // One loop for each combination, so that no loop has a branch.
            (Curve::Rate(a), Curve::Rate(b), Mask::Causal) if self.windows.is_empty() && self.chunks.is_empty() => {
                lengths.iter().map(|&d| a * Mask::Causal.pairs_f64(d) + b * f64::from(d) + document).collect()
            }
            (Curve::Rate(a), Curve::Rate(b), Mask::Causal) => {
                let mut costs: Vec<f64> = lengths.iter().map(|&d| a * Mask::Causal.pairs_f64(d)).collect();
                for (mask, rate) in self.local_terms() {
                    match mask {
                        LocalMask::Window(size) => {
                            add(&mut costs, lengths, |d| rate * LocalMask::Window(size).pairs_f64(d))
                        }
                        LocalMask::Chunk(size) => {
                            add(&mut costs, lengths, |d| rate * LocalMask::Chunk(size).pairs_f64(d))
                        }
                    }
                }
                add(&mut costs, lengths, |d| b * f64::from(d));
                add(&mut costs, lengths, |_| document);
                costs
            }
            _ => lengths.iter().map(|&length| self.cost(length)).collect(),
        }
    }

    /// Checks that any sum of these documents' costs is finite; errors name `lengths`.
    ///
    /// # Errors
    /// [`Error::InfiniteCost`] naming the longest document if a sum is infinite.
    pub fn check_finite(&self, lengths: &[i32]) -> Result<()> {
        // Cost never decreases with length, so the longest document bounds them all.
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let most = self.cost(longest) * lengths.len() as f64 + self.micro_batch * MAX_MICRO_BATCHES as f64;
        if most.is_finite() {
            return Ok(());
        }
        let index = lengths.iter().position(|&length| length == longest).unwrap_or(0);
        Err(Error::InfiniteCost { argument: "lengths", index, value: i64::from(longest) })
    }

    /// Checks the guarantees of the constructors for a model that was read from a file.
    pub(crate) fn check(&self) -> Result<()> {
        self.attention.check("attention")?;
        self.linear.check("linear")?;
        check_local("windows", &self.windows, self.mask)?;
        check_local("chunks", &self.chunks, self.mask)?;
        check_rate("document", self.document)?;
        check_rate("micro_batch", self.micro_batch)?;
        let of_length = [&self.attention, &self.linear].iter().any(|curve| **curve != Curve::Rate(0.0));
        if !of_length && self.windows.is_empty() && self.chunks.is_empty() && self.document == 0.0 {
            let requirement = "attention, linear, windows, chunks and document must not all be 0";
            return Err(Error::Number { argument: "linear", value: 0.0, requirement });
        }
        Ok(())
    }
}

fn add(costs: &mut [f64], lengths: &[i32], term: impl Fn(i32) -> f64) {
    for (cost, &length) in costs.iter_mut().zip(lengths) {
        *cost += term(length);
    }
}
