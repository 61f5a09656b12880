//! Costs that the user gives for each document.

use crate::error::{Error, Result, check_range};
use crate::limits::MAX_COLUMNS;

/// Costs of documents: one row for each document, one column for each resource that ranks wait for separately.
///
/// A step takes the sum over columns of the heaviest micro-batch in each column: for example, all ranks run the vision
/// encoder first, then all run the language model. A column with a limit is memory: it takes no time, and no
/// micro-batch may hold more of it than the limit.
#[derive(Clone, Debug, PartialEq)]
pub struct DocumentCosts {
    columns: usize,
    /// The costs, row by row: a row for each document, a number for each column.
    values: Vec<f64>,
    /// The limit of each column that has one.
    limits: Vec<Option<f64>>,
    /// Whether any column has a limit.
    limited: bool,
    /// Sum of each column.
    sums: Vec<f64>,
    /// Largest entry of each column.
    largest: Vec<f64>,
}

impl DocumentCosts {
    /// Checks every entry and makes the table.
    ///
    /// # Arguments
    /// * `values` - row by row: `documents * columns` numbers.
    /// * `limits` - limit of each column, infinite for a column without one; empty if no column has a limit.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another number of rows or limits, [`Error::OutOfRange`] for the number of columns,
    /// [`Error::Cell`] for a cost that is negative, not finite, or above its column's limit, [`Error::Entry`] for a
    /// limit.
    ///
    /// # Complexity
    /// O(values).
    pub fn new(mut values: Vec<f64>, documents: usize, columns: usize, limits: &[f64]) -> Result<Self> {
        check_range("columns of costs", columns as i64, 1, MAX_COLUMNS as i64)?;
        let (argument, other) = ("costs", "lengths");
        if values.len() != documents * columns {
            let found = values.len() / columns;
            return Err(Error::Mismatch { argument, found, other, expected: documents });
        }
        let limits = check_limits(limits, columns)?;
        let cell = |at: usize, value: f64, requirement| {
            let place = (columns > 1).then_some(at % columns);
            Err(Error::Cell { argument, row: at / columns, column: place, value, requirement })
        };
        // Turn -0.0 into 0.0.
        values.iter_mut().for_each(|value| *value += 0.0);
        let (legal, sums, largest) = summary_of(&values, columns);
        if !(legal && f64::is_finite(sums.iter().sum())) {
            let wrong = |value: &f64| !(value.is_finite() && *value >= 0.0);
            return match values.iter().position(wrong) {
                Some(at) => cell(at, values[at], "must be a finite number, 0 or above"),
                None => cell(0, values[0], "is one of costs whose sum is beyond floats"),
            };
        }
        let limited = limits.iter().any(Option::is_some);
        let exceeds = |&at: &usize| limits[at % columns].is_some_and(|limit| values[at] > limit);
        if limited && let Some(at) = (0..values.len()).find(exceeds) {
            return cell(at, values[at], "exceeds the limit of its column: no micro-batch can hold this document");
        }
        Ok(Self { columns, values, limits, limited, sums, largest })
    }

    /// Costs that need no check (they were checked before, or come from a model); `limits` has one entry for each
    /// column.
    ///
    /// # Complexity
    /// O(values).
    pub(crate) fn checked(values: Vec<f64>, limits: Vec<Option<f64>>) -> Self {
        let columns = limits.len();
        let (_, sums, largest) = summary_of(&values, columns);
        let limited = limits.iter().any(Option::is_some);
        Self { columns, values, limits, limited, sums, largest }
    }

    /// Checks that no column is all zeros: such a column is a mistake, if all documents are here.
    ///
    /// # Errors
    /// [`Error::Column`] naming a column of zeros.
    pub fn check_columns(&self) -> Result<()> {
        match self.largest.iter().position(|&most| most == 0.0).filter(|_| !self.values.is_empty()) {
            None => Ok(()),
            Some(column) => {
                let requirement = if self.columns == 1 {
                    "is 0 for every document: say what each costs, or give a cost_model instead"
                } else {
                    "is 0 for every document: leave this column out"
                };
                Err(Error::Column { argument: "costs", column, requirement })
            }
        }
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.values.len() / self.columns
    }

    /// Costs of one document.
    #[inline]
    pub fn row(&self, document: usize) -> &[f64] {
        &self.values[document * self.columns..][..self.columns]
    }

    /// Costs of all documents, row by row.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The limit of each column, if it has one.
    pub fn limits(&self) -> &[Option<f64>] {
        &self.limits
    }

    /// Whether a column has a limit.
    #[inline]
    pub fn is_limited(&self) -> bool {
        self.limited
    }

    /// Sum of all documents' costs in each column.
    pub fn sums(&self) -> &[f64] {
        &self.sums
    }

    /// The greatest cost of a document in each column.
    pub fn largest(&self) -> &[f64] {
        &self.largest
    }
}

/// Checks `limits` for this number of columns. Without limits no column has one; with them, at least one column must
/// have none.
pub(crate) fn check_limits(limits: &[f64], columns: usize) -> Result<Vec<Option<f64>>> {
    let argument = "limits";
    if limits.is_empty() {
        return Ok(vec![None; columns]);
    }
    if limits.len() != columns {
        return Err(Error::Mismatch {
            argument,
            found: limits.len(),
            other: "the columns of costs",
            expected: columns,
        });
    }
    if let Some((index, &value)) = limits.iter().enumerate().find(|&(_, &limit)| limit.is_nan() || limit <= 0.0) {
        return Err(Error::Entry { argument, index, value, requirement: "must be above 0, infinite for none" });
    }
    if limits.iter().all(|limit| limit.is_finite()) {
        let requirement = "leave no column that takes time: a column with a limit is memory";
        return Err(Error::Combination { argument, requirement });
    }
    Ok(limits.iter().map(|&limit| limit.is_finite().then_some(limit)).collect())
}

/// Whether no value is negative, and the sum and the largest of each column. The sum is not finite if a value is not.
fn summary_of(values: &[f64], columns: usize) -> (bool, Vec<f64>, Vec<f64>) {
    match columns {
        // Four partial sums side by side, since each addition waits for the result of the one before it.
        1 => {
            let (quadruples, rest) = values.split_at(values.len() / 4 * 4);
            let (legal, sums, largest) = summary::<4>(quadruples);
            let (rest_legal, rest_sum, rest_largest) = summary::<1>(rest);
            let sum = sums.iter().sum::<f64>() + rest_sum[0];
            let most = largest.into_iter().fold(rest_largest[0], f64::max);
            (legal && rest_legal, vec![sum], vec![most])
        }
        2 => summary::<2>(values),
        _ => summary_of_any(values, columns),
    }
}

/// [`summary_of`] without a branch for each value.
fn summary<const COLUMNS: usize>(values: &[f64]) -> (bool, Vec<f64>, Vec<f64>) {
    let (mut least, mut sums, mut largest) = ([0.0; COLUMNS], [0.0; COLUMNS], [0.0; COLUMNS]);
    for row in values.as_chunks::<COLUMNS>().0 {
        for column in 0..COLUMNS {
            let value = row[column];
            least[column] = if value < least[column] { value } else { least[column] };
            sums[column] += value;
            largest[column] = if value > largest[column] { value } else { largest[column] };
        }
    }
    (least == [0.0; COLUMNS], sums.to_vec(), largest.to_vec())
}

fn summary_of_any(values: &[f64], columns: usize) -> (bool, Vec<f64>, Vec<f64>) {
    let mut parts = (true, vec![0.0; columns], vec![0.0; columns]);
    for row in values.chunks_exact(columns) {
        for ((&value, sum), most) in row.iter().zip(&mut parts.1).zip(&mut parts.2) {
            parts.0 &= value >= 0.0;
            *sum += value;
            *most = if value > *most { value } else { *most };
        }
    }
    parts
}
