//! What Python declares and hands down, so that the engine imports nothing of it: the frozen dataclasses of
//! `wlb._results`, for results that are only read, and functions that read arrays (`wlb._arrays`) and files
//! (`wlb.profile`).

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

/// Classes and functions by name.
static DECLARED: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

fn declared(py: Python<'_>) -> &Bound<'_, PyDict> {
    DECLARED.get_or_init(py, || PyDict::new(py).unbind()).bind(py)
}

/// Decorates a dataclass: the core answers with instances of it where it has a result of that name.
#[pyfunction]
pub(crate) fn result<'py>(cls: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    declared(cls.py()).set_item(cls.getattr("__name__")?, &cls)?;
    Ok(cls)
}

/// Functions that the core calls, by module and name, where it needs them.
#[pyfunction]
#[pyo3(signature = (*functions))]
pub(crate) fn hand_down(functions: &Bound<'_, PyTuple>) -> PyResult<()> {
    functions.iter().try_for_each(|function| {
        let name = format!("{}.{}", function.getattr("__module__")?, function.getattr("__name__")?);
        declared(functions.py()).set_item(name, function)
    })
}

/// The class or function of that name.
pub(crate) fn declaration<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let missing = || PyRuntimeError::new_err(format!("nothing for {name}: import wlb, not wlb._core alone"));
    declared(py).get_item(name)?.ok_or_else(missing)
}

/// `answer!(py, "Class", source { field, method(), ...; field: value, ... })`: a result whose fields have the values of
/// the source's fields and methods of the same name, and these, each converted by itself.
macro_rules! answer {
    ($py:expr, $class:literal, $source:ident {
        $($same:ident $(($($none:tt)*))?),+ $(; $($field:ident: $value:expr),+ $(,)?)?
    }) => {
        $crate::results::answer!($py, $class, {
            $($same: $source.$same $(($($none)*))?,)+ $($($field: $value,)+)?
        })
    };
    ($py:expr, $class:literal, { $($field:ident: $value:expr),+ $(,)? }) => {{
        let fields = pyo3::types::PyDict::new($py);
        $(fields.set_item(pyo3::intern!($py, stringify!($field)), $value)?;)+
        $crate::results::declaration($py, $class)?.call((), Some(&fields))
    }};
}
pub(crate) use answer;
