//! Turns errors of the core into Python exceptions.

use pyo3::IntoPyObjectExt;
use pyo3::create_exception;
use pyo3::exceptions::{PyUserWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use wlb_core::Error;
use wlb_core::error::shown;

create_exception!(
    wlb,
    WlbError,
    PyValueError,
    "Wrong input. Nothing was changed.\n\nAttributes:\n    argument: name of the argument that is wrong.\n    index: where in it, if \
     it is a sequence.\n    value: the value that is wrong, if there is a single one."
);
create_exception!(
    wlb,
    StateError,
    WlbError,
    "A saved state that cannot be loaded: corrupt, foreign, or of another configuration."
);

create_exception!(
    wlb,
    BacklogWarning,
    PyUserWarning,
    "More documents wait in a packer than its bounds allow: they arrive faster than they can be trained."
);

/// Declares the attributes on the class, so that an exception raised by Python code has them, too.
pub(crate) fn annotate_class(py: Python<'_>) -> PyResult<()> {
    let base = py.get_type::<WlbError>();
    ["argument", "index", "value"].into_iter().try_for_each(|attribute| base.setattr(attribute, py.None()))
}

/// The Python exception for an error of the core.
pub(crate) fn raise(error: Error) -> PyErr {
    if let Error::Cell { argument, row, column, value, requirement } = error {
        let place: Vec<usize> = [row].into_iter().chain(column).collect();
        return refuse_entry(argument, &place, value, requirement);
    }
    let message = error.to_string();
    Python::attach(|py| {
        let exception = match error {
            Error::State { .. } | Error::ConfigChanged { .. } => StateError::new_err(message),
            _ => WlbError::new_err(message),
        };
        annotate(py, exception, error.argument(), error.index(), value(py, &error).ok())
    })
}

/// The exception for input that is refused before it reaches the core.
pub(crate) fn refuse(
    argument: &str,
    index: Option<usize>,
    value: Option<&Bound<'_, PyAny>>,
    problem: impl AsRef<str>,
) -> PyErr {
    let problem = problem.as_ref();
    Python::attach(|py| {
        let place = index.map_or_else(|| argument.to_owned(), |index| format!("{argument}[{index}]"));
        let message = match value {
            Some(value) => {
                let shown = value.repr().map_or_else(|_| "?".to_owned(), |repr| shorten(&repr.to_string()));
                format!("{place} = {shown}: {problem}")
            }
            None => format!("{place}: {problem}"),
        };
        let value = value.map_or_else(|| py.None(), |value| value.clone().unbind());
        annotate(py, WlbError::new_err(message), argument, index, value)
    })
}

/// The exception for one entry of an array of any shape; with several dimensions its index is a tuple.
pub(crate) fn refuse_entry(argument: &str, place: &[usize], value: f64, problem: &str) -> PyErr {
    Python::attach(|py| {
        let at = place.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let error = WlbError::new_err(format!("{argument}[{at}] = {}: {problem}", shown(value)));
        match place {
            [index] => annotate(py, error, argument, index, value),
            _ => annotate(py, error, argument, PyTuple::new(py, place).ok(), value),
        }
    })
}

/// 2^53: up to here every integer is exact as float64.
const MOST_EXACT: f64 = 9_007_199_254_740_992.0;

fn shorten(text: &str) -> String {
    if text.chars().count() <= 80 { text.to_owned() } else { text.chars().take(77).chain("...".chars()).collect() }
}

fn annotate<'py>(
    py: Python<'py>,
    error: PyErr,
    argument: &str,
    index: impl IntoPyObject<'py>,
    value: impl IntoPyObject<'py>,
) -> PyErr {
    let instance = error.value(py);
    let annotated = instance
        .setattr("argument", argument)
        .and_then(|()| instance.setattr("index", index))
        .and_then(|()| instance.setattr("value", value));
    annotated.err().unwrap_or(error)
}

/// The value that is wrong, if there is a single one. Numbers and strings convert to objects without fail.
fn value(py: Python<'_>, error: &Error) -> PyResult<Py<PyAny>> {
    match error {
        Error::Length { value, .. }
        | Error::TooLong { value, .. }
        | Error::GroupTooLarge { value, .. }
        | Error::OutOfRange { value, .. }
        | Error::DuplicateId { value, .. }
        | Error::Unlike { value, .. }
        | Error::Indivisible { value, .. }
        | Error::Schedule { value, .. }
        | Error::InfiniteCost { value, .. }
        | Error::LeftOver { value, .. }
        | Error::NoBucket { value, .. }
        | Error::Backlog { pending_tokens: value, .. }
        | Error::TotalTooLong { total: value, .. } => value.into_py_any(py),
        Error::Mismatch { found, .. } => found.into_py_any(py),
        // A larger value may come from several different integers, so it stays a float.
        Error::Entry { value, .. } if value.fract() == 0.0 && value.abs() <= MOST_EXACT => {
            (*value as i64).into_py_any(py)
        }
        Error::Number { value, .. } | Error::Entry { value, .. } => value.into_py_any(py),
        Error::Choice { value, .. } => value.into_py_any(py),
        Error::Cell { .. }
        | Error::Column { .. }
        | Error::Combination { .. }
        | Error::Interrupted
        | Error::Order { .. }
        | Error::Profile { .. }
        | Error::State { .. }
        | Error::ConfigChanged { .. } => Ok(py.None()),
    }
}
