//! Checks the entries of a kernel's description.

use crate::error::{Error, Result};
use crate::limits::MAX_TOKENS;

/// Checks the lengths of a grid: at least one, ascending, each a valid length.
pub(crate) fn ascending(path: &str, values: &[i64]) -> Result<()> {
    if values.is_empty() {
        return wrong(path, "is empty");
    }
    let mut last = 0;
    for (index, &value) in values.iter().enumerate() {
        if !(1..=MAX_TOKENS).contains(&value) {
            return wrong(format!("{path}[{index}]"), format!("{value} is not from 1 to {MAX_TOKENS}"));
        }
        if value <= last {
            return wrong(format!("{path}[{index}]"), format!("{value} is not above the entry before it"));
        }
        last = value;
    }
    Ok(())
}

pub(crate) fn check_count(path: &str, found: usize, other: &str, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { wrong(path, format!("has {found} entries, but {other} has {expected}")) }
}

/// Checks that a time is above 0 and neither infinite nor denormal.
pub(crate) fn check_seconds(path: impl Fn() -> String, seconds: f64) -> Result<()> {
    if seconds.is_normal() && seconds > 0.0 { Ok(()) } else { wrong(path(), format!("{seconds} is no time above 0")) }
}

pub(crate) fn wrong<T>(path: impl Into<String>, problem: impl Into<String>) -> Result<T> {
    Err(Error::Profile { path: path.into(), problem: problem.into() })
}
