//! The ratio of a value to a mean, safe near the largest floats.

/// The largest value, `part`, over the mean of `count` values with the sum `total`; 1 if all values are 0.
pub(crate) fn over_mean(part: f64, count: usize, total: f64) -> f64 {
    if total <= 0.0 {
        return 1.0;
    }
    let (count, scaled) = (count as f64, part * count as f64);
    let ratio = if scaled.is_finite() { scaled / total } else { part / total * count };
    ratio.max(1.0) // a mean that was rounded up may exceed the largest value
}
