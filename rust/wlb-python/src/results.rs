//! Classes and functions that Python hands to the engine, so that the engine imports no Python module: the frozen
//! dataclasses of `wlb._results`, and functions that read arrays (`wlb._arrays`), read profiles (`wlb.profiles`) and
//! show objects (`wlb._shown`).

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

/// Classes by name, and functions by module and name.
static DECLARED: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

fn declared(py: Python<'_>) -> &Bound<'_, PyDict> {
    DECLARED.get_or_init(py, || PyDict::new(py).unbind()).bind(py)
}

/// Decorates a dataclass: results of that name from the core become instances of it.
#[pyfunction]
pub(crate) fn result<'py>(cls: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    declared(cls.py()).set_item(cls.getattr("__name__")?, &cls)?;
    Ok(cls)
}

/// Hands functions to the core, which finds them by module and name.
#[pyfunction]
#[pyo3(signature = (*functions))]
pub(crate) fn hand_down(functions: &Bound<'_, PyTuple>) -> PyResult<()> {
    functions.iter().try_for_each(|function| {
        let name = format!("{}.{}", function.getattr("__module__")?, function.getattr("__name__")?);
        declared(functions.py()).set_item(name, function)
    })
}

/// The class or function with this name.
pub(crate) fn declaration<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let missing = || PyRuntimeError::new_err(format!("nothing for {name}: import wlb, not wlb._core alone"));
    declared(py).get_item(name)?.ok_or_else(missing)
}

/// `answer!(py, "Class", source { field, method(), ...; field: value, ... })`: an instance of the class. Its fields are
/// the fields and methods of `source` with the same name, and the given values, each converted by itself.
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
