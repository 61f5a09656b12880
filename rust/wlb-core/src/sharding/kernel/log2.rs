//! A logarithm that is the same on every machine.

/// Binary logarithm of a whole number of at least 1, within 1e-12, of `+ - * /` only: the same on every machine.
///
/// The exponent's bits are the whole part. The mantissa's first bits choose a knot of a table, and a short series does
/// the rest of the way: `ln(1 + r)` for `r < 1/128`.
#[inline]
pub(super) fn log2(length: i32) -> f64 {
    const FRACTION: u64 = (1 << 52) - 1;
    let bits = f64::from(length).to_bits();
    let exponent = (bits >> 52) as i64 - 1023;
    let mantissa = f64::from_bits(bits & FRACTION | 1023 << 52);
    let (inverse, log) = KNOTS[(bits >> (52 - KNOT_BITS)) as usize % KNOTS.len()];
    let r = mantissa * inverse - 1.0;
    let series = r * (1.0 - r * (1.0 / 2.0 - r * (1.0 / 3.0 - r * (1.0 / 4.0 - r * (1.0 / 5.0)))));
    exponent as f64 + (log + std::f64::consts::LOG2_E * series)
}

const KNOT_BITS: u32 = 7;

/// `(1 / m, log2(m))` at even steps of a mantissa `m` from 1 to 2.
static KNOTS: [(f64, f64); 1 << KNOT_BITS] = knots();

const fn knots() -> [(f64, f64); 1 << KNOT_BITS] {
    let mut knots = [(1.0, 0.0); 1 << KNOT_BITS];
    let mut knot = 1;
    while knot < knots.len() {
        let mantissa = 1.0 + knot as f64 / knots.len() as f64;
        // ln(m) = 2 atanh(t) with t = (m - 1) / (m + 1), at most 1/3: t + t^3/3 + t^5/5 + ...
        let t = (mantissa - 1.0) / (mantissa + 1.0);
        let (mut atanh, mut power, mut odd) = (0.0, t, 1.0);
        while odd < 40.0 {
            atanh += power / odd;
            power *= t * t;
            odd += 2.0;
        }
        knots[knot] = (1.0 / mantissa, 2.0 * std::f64::consts::LOG2_E * atanh);
        knot += 1;
    }
    knots
}
