//! Cost as a function of an amount of work.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Cost as a function of an amount of work, zero at zero, never decreasing.
///
/// Only `+ - * /`: they round the same on every machine, a logarithm would not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Curve {
    /// Cost per unit of work.
    Rate(f64),
    /// Measured `(work, cost)` knots, ascending: linear between them (and from the origin to the first),
    /// proportional beyond the last. Attention is exact between knots wherever it is quadratic in the length,
    /// because the work is counted in pairs.
    Table(Vec<(f64, f64)>),
}

impl Curve {
    #[inline]
    pub(super) fn at(&self, work: f64) -> f64 {
        match self {
            Self::Rate(rate) => rate * work,
            Self::Table(knots) => interpolate(knots, work),
        }
    }

    /// Checks the guarantees of the constructors, for a curve that was read from a file.
    pub(super) fn check(&self, argument: &'static str) -> Result<()> {
        match self {
            Self::Rate(rate) => check_rate(argument, *rate),
            Self::Table(knots) => {
                let Some(first) = knots.first() else {
                    return Err(Error::Combination { argument, requirement: "a table needs at least one knot" });
                };
                let entry = |index, value, requirement| Err(Error::Entry { argument, index, value, requirement });
                let (mut work, mut cost) = (0.0, first.1);
                for (index, &(next_work, next_cost)) in knots.iter().enumerate() {
                    if !(next_work.is_finite() && next_work > work) {
                        return entry(index, next_work, "knots must ascend");
                    }
                    if !(next_cost.is_finite() && next_cost > 0.0) {
                        return entry(index, next_cost, "must be a finite number above 0");
                    }
                    if next_cost < cost {
                        return entry(index, next_cost, "must not be below the entry before it");
                    }
                    (work, cost) = (next_work, next_cost);
                }
                Ok(())
            }
        }
    }
}

fn interpolate(knots: &[(f64, f64)], work: f64) -> f64 {
    let above = knots.partition_point(|&(knot, _)| knot < work);
    let (x0, y0) = if above == 0 { (0.0, 0.0) } else { knots[above - 1] };
    match knots.get(above) {
        Some(&(x1, y1)) => y0 + (y1 - y0) * ((work - x0) / (x1 - x0)),
        None => y0 * (work / x0),
    }
}

pub(super) fn check_rate(argument: &'static str, rate: f64) -> Result<()> {
    if rate.is_finite() && rate >= 0.0 {
        Ok(())
    } else {
        Err(Error::Number { argument, value: rate, requirement: "must be a finite number, 0 or above" })
    }
}
