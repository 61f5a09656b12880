//! Rates that most measured times agree on; a few wrong times do not change them.

use super::least_squares::System;

/// Standard deviations where Huber's weights begin to fall, and where the weights of Tukey's bisquare reach 0. With
/// these, the rates are 95 % as exact as least squares if the noise is normal.
const HUBER: f64 = 1.345;
const BISQUARE: f64 = 4.685;

/// Most iterations with either weight; a handful is usual.
const MOST_TURNS: usize = 60;

/// Largest ratio of a measured time to its prediction that counts. Larger times are clipped to it: Huber's sum has the
/// same minimum, and squares of larger numbers would drown all other rows in rounding.
const MOST_OVER: f64 = 1e6;

/// Noise below this is rounding error.
const LEAST_NOISE: f64 = 1e-9;

/// Result of a robust fit of times to columns.
pub(super) struct Agreement {
    pub(super) rates: Vec<f64>,
    /// Prediction for each row.
    pub(super) predicted: Vec<f64>,
    /// Weight of each row: 1, less, or 0 for an outlier.
    pub(super) weights: Vec<f64>,
    /// Standard deviation of the rows that are not outliers, relative to their predictions.
    pub(super) noise: f64,
}

/// The non-negative rates with the least sum of `rho((seconds - predicted) / predicted)`.
///
/// Errors are relative to the prediction: a micro-batch of a second and one of a millisecond say equally much about the
/// rates, and noise that grows with the time does not make fast micro-batches look slow. `rho` is Huber's first, whose
/// minimum does not depend on the starting point. From there it is Tukey's bisquare, which gives outliers no weight.
/// The scale of the errors is their median absolute value, taken anew in every iteration.
///
/// # Arguments
/// * `columns` - amounts of work, each as long as `seconds`.
/// * `among` - indices of the columns that may get a rate.
/// * `seconds` - above 0.
pub(super) fn agree(columns: &[Vec<f64>], among: &[usize], seconds: &[f64]) -> Agreement {
    let mut now = Agreement {
        rates: vec![0.0; columns.len()],
        predicted: by_one(columns, among, seconds),
        weights: vec![1.0; seconds.len()],
        noise: 1.0,
    };
    for bisquare in [false, true] {
        for _ in 0..MOST_TURNS {
            let before = now.predicted.clone();
            weigh(&mut now, seconds, bisquare);
            now.rates = weighted(columns, &now, seconds).solve(among);
            now.predicted = predict(columns, &now.rates);
            keep_above_zero(&mut now.predicted);
            let moved = now.predicted.iter().zip(&before).map(|(now, before)| ((now - before) / before).abs());
            if moved.fold(0.0, f64::max) < 1e-10 {
                break;
            }
        }
    }
    weigh(&mut now, seconds, true);
    now
}

/// The rows as a least-squares problem: each divided by its prediction and multiplied by the root of its weight.
pub(super) fn weighted(columns: &[Vec<f64>], by: &Agreement, seconds: &[f64]) -> System {
    let factors: Vec<f64> = by.weights.iter().zip(&by.predicted).map(|(weight, at)| weight.sqrt() / at).collect();
    let scaled =
        |values: &[f64]| -> Vec<f64> { values.iter().zip(&factors).map(|(value, factor)| value * factor).collect() };
    let bounded: Vec<f64> = seconds.iter().zip(&by.predicted).map(|(&time, at)| time.min(MOST_OVER * at)).collect();
    System::new(&columns.iter().map(|column| scaled(column)).collect::<Vec<_>>(), &scaled(&bounded))
}

/// Predicted time of each row.
pub(super) fn predict(columns: &[Vec<f64>], rates: &[f64]) -> Vec<f64> {
    let rows = columns.first().map_or(0, Vec::len);
    (0..rows).map(|row| columns.iter().zip(rates).map(|(column, rate)| column[row] * rate).sum()).collect()
}

/// The median; the upper of the two middle values if the number is even; 0 of no values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

fn weigh(now: &mut Agreement, seconds: &[f64], bisquare: bool) {
    let errors: Vec<f64> =
        seconds.iter().zip(&now.predicted).map(|(&time, at)| (time.min(MOST_OVER * at) - at) / at).collect();
    now.noise = (1.4826 * median(errors.iter().map(|error| error.abs()).collect())).max(LEAST_NOISE);
    now.weights = errors
        .iter()
        .map(|error| {
            let deviations = error.abs() / now.noise;
            if bisquare {
                let inside = 1.0 - (deviations / BISQUARE) * (deviations / BISQUARE);
                if inside > 0.0 { inside * inside } else { 0.0 }
            } else if deviations > HUBER {
                HUBER / deviations
            } else {
                1.0
            }
        })
        .collect();
}

/// Starting point: the single column that explains the times best, with the median of its rates.
fn by_one(columns: &[Vec<f64>], among: &[usize], seconds: &[f64]) -> Vec<f64> {
    let candidates = among.iter().map(|&at| {
        let column = &columns[at];
        let rates = column.iter().zip(seconds).filter(|&(&work, _)| work > 0.0).map(|(work, time)| time / work);
        let rate = median(rates.collect());
        let predicted: Vec<f64> = column.iter().map(|work| rate * work).collect();
        // The ratio is symmetric, so that neither a time far above nor one far below the prediction decides.
        let errors = predicted.iter().zip(seconds).map(|(at, time)| (at - time).abs() / at.max(*time));
        (median(errors.collect()), predicted)
    });
    let best = candidates.min_by(|a, b| a.0.total_cmp(&b.0));
    let mut predicted = best.map_or_else(|| seconds.to_vec(), |(_, predicted)| predicted);
    keep_above_zero(&mut predicted);
    predicted
}

/// Replaces a prediction of 0 (an empty micro-batch) by a thousandth of the median prediction.
fn keep_above_zero(predicted: &mut [f64]) {
    let least = (1e-3 * median(predicted.to_vec())).max(f64::MIN_POSITIVE);
    predicted.iter_mut().for_each(|at| *at = at.max(least));
}
