//! Least squares with rates that are never negative.

/// `b >= 0` with the least sum of squares of `sum_j b[j] * columns[j] - target`.
///
/// Lawson and Hanson's active set method (Solving Least Squares Problems, 1974, chapter 23) on the triangular factor of
/// the columns. If columns depend on each other, the method uses a set of independent ones; the others get 0.
///
/// # Arguments
/// * `columns` - each of the length of `target`; finite.
///
/// # Complexity
/// O(n k^2) for `n` rows and `k` columns, and about k^4 more for the search.
pub fn non_negative_least_squares(columns: &[Vec<f64>], target: &[f64]) -> Vec<f64> {
    System::new(columns, target).solve(&(0..columns.len()).collect::<Vec<_>>())
}

/// A column whose pivot is below this share of its length depends on the columns before it.
const DEPENDENT: f64 = 1e-10;

/// Most columns that enter or leave in one search. In exact arithmetic no set of columns comes twice, and few columns
/// ever enter twice.
const MOST_TURNS: usize = 1000;

/// A least-squares problem of `k` columns after a QR decomposition: the upper triangle, the first `k` rows of the
/// target, and the sum of squares of the rest of the target, which no column reaches.
pub(super) struct System {
    /// Column by column, each scaled to length 1; a column of zeros stays 0.
    triangle: Vec<Vec<f64>>,
    target: Vec<f64>,
    /// Lengths of the columns before scaling.
    norms: Vec<f64>,
    /// Sum of squares that remains for any rates.
    beyond: f64,
}

impl System {
    pub(super) fn new(columns: &[Vec<f64>], target: &[f64]) -> Self {
        let norms: Vec<f64> = columns.iter().map(|column| norm(column)).collect();
        let mut triangle: Vec<Vec<f64>> = columns.to_vec();
        for (column, &norm) in triangle.iter_mut().zip(&norms) {
            if norm > 0.0 {
                column.iter_mut().for_each(|value| *value /= norm);
            }
        }
        let mut target = target.to_vec();
        let rank = columns.len().min(target.len());
        for at in 0..rank {
            reflect(&mut triangle, &mut target, at, at);
        }
        let beyond = target[rank..].iter().map(|value| value * value).sum();
        target.truncate(rank);
        triangle.iter_mut().for_each(|column| column.truncate(rank));
        Self { triangle, target, norms, beyond }
    }

    /// Length of a column before scaling.
    pub(super) fn norm(&self, column: usize) -> f64 {
        self.norms[column]
    }

    /// The best non-negative rates of the columns in `among`; all other rates are 0.
    pub(super) fn solve(&self, among: &[usize]) -> Vec<f64> {
        let mut rates = self.solve_scaled(among);
        for (rate, &norm) in rates.iter_mut().zip(&self.norms) {
            *rate = if norm > 0.0 { *rate / norm } else { 0.0 };
        }
        rates
    }

    /// Sum of squares that remains with the best rates of these columns.
    pub(super) fn squares(&self, among: &[usize]) -> f64 {
        let residual = self.residual(&self.solve_scaled(among));
        self.beyond + residual.iter().map(|value| value * value).sum::<f64>()
    }

    /// The part of a column that the `others` do not explain, as a share of its length, and the factors of the others
    /// (of any sign, for columns of length 1).
    pub(super) fn apart(&self, column: usize, others: &[usize]) -> (f64, Vec<f64>) {
        let target = &self.triangle[column];
        let (shares, _) = least_squares(&self.triangle, target, others);
        let mut left = target.clone();
        for (&other, share) in others.iter().zip(&shares) {
            add(&mut left, -share, &self.triangle[other]);
        }
        (norm(&left), shares)
    }

    fn residual(&self, rates: &[f64]) -> Vec<f64> {
        let mut residual = self.target.clone();
        for (column, &rate) in self.triangle.iter().zip(rates) {
            add(&mut residual, -rate, column);
        }
        residual
    }

    fn solve_scaled(&self, among: &[usize]) -> Vec<f64> {
        let columns = self.triangle.len();
        let mut rates = vec![0.0; columns];
        let mut free: Vec<usize> = Vec::new();
        let mut refused = vec![false; columns];
        let least = DEPENDENT * norm(&self.target);
        for _ in 0..MOST_TURNS {
            // The column whose growth lowers the sum of squares fastest.
            let residual = self.residual(&rates);
            let gain = |column: usize| dot(&self.triangle[column], &residual);
            let best = among
                .iter()
                .copied()
                .filter(|column| !free.contains(column) && !refused[*column] && gain(*column) > least)
                .max_by(|&a, &b| gain(a).total_cmp(&gain(b)).then(b.cmp(&a)));
            let Some(column) = best else { break };
            free.push(column);
            let mut first = true;
            loop {
                let (wanted, independent) = least_squares(&self.triangle, &self.target, &free);
                // With rounding, a useless column may seem useful; without this check it would enter and leave for
                // ever.
                if first && (!independent || wanted.last().is_none_or(|&rate| rate <= 0.0)) {
                    free.pop();
                    refused[column] = true;
                    break;
                }
                first = false;
                if wanted.iter().all(|&rate| rate > 0.0) {
                    free.iter().zip(&wanted).for_each(|(&column, &rate)| rates[column] = rate);
                    refused.fill(false);
                    break;
                }
                // Go from the present rates towards the wanted ones, as far as no rate gets negative. The column that
                // would be the first to get negative gets 0.
                let reach = |column: usize, rate: f64| {
                    if rate > 0.0 { 1.0 } else { rates[column] / (rates[column] - rate) }
                };
                let steps: Vec<f64> = free.iter().zip(&wanted).map(|(&column, &rate)| reach(column, rate)).collect();
                let step = steps.iter().copied().fold(1.0, f64::min);
                for ((&column, &rate), &own) in free.iter().zip(&wanted).zip(&steps) {
                    rates[column] =
                        if own <= step && rate <= 0.0 { 0.0 } else { rates[column] + step * (rate - rates[column]) };
                }
                free.retain(|&column| rates[column] > 0.0);
            }
        }
        rates
    }
}

/// The best rates of some columns, of any sign, and whether all columns are independent. A column that depends on those
/// before it gets 0.
fn least_squares(columns: &[Vec<f64>], target: &[f64], among: &[usize]) -> (Vec<f64>, bool) {
    let mut triangle: Vec<Vec<f64>> = among.iter().map(|&column| columns[column].clone()).collect();
    let mut target = target.to_vec();
    let mut pivots: Vec<(usize, usize)> = Vec::new();
    for column in 0..triangle.len() {
        let row = pivots.len();
        if row < target.len() && norm(&triangle[column][row..]) > DEPENDENT {
            reflect(&mut triangle, &mut target, column, row);
            pivots.push((column, row));
        }
    }
    let mut rates = vec![0.0; among.len()];
    for &(column, row) in pivots.iter().rev() {
        let later: f64 = (column + 1..triangle.len()).map(|other| triangle[other][row] * rates[other]).sum();
        rates[column] = (target[row] - later) / triangle[column][row];
    }
    (rates, pivots.len() == among.len())
}

/// A Householder reflection that leaves zeros below `row` in one column; the columns before it are finished.
fn reflect(columns: &mut [Vec<f64>], target: &mut [f64], column: usize, row: usize) {
    let mut mirror = columns[column][row..].to_vec();
    let length = norm(&mirror);
    if length == 0.0 {
        return;
    }
    mirror[0] += if mirror[0] < 0.0 { -length } else { length };
    let square = dot(&mirror, &mirror);
    let turn = |values: &mut [f64]| {
        let factor = -2.0 * dot(&mirror, values) / square;
        add(values, factor, &mirror);
    };
    columns[column..].iter_mut().for_each(|values| turn(&mut values[row..]));
    turn(&mut target[row..]);
    columns[column][row + 1..].fill(0.0);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(values: &[f64]) -> f64 {
    dot(values, values).sqrt()
}

fn add(to: &mut [f64], factor: f64, values: &[f64]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += factor * value);
}
