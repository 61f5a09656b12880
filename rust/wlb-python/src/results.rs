//! Results that are only read: frozen dataclasses, which Python declares in `wlb._results` and hands down.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// The dataclasses by name.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

fn classes(py: Python<'_>) -> &Bound<'_, PyDict> {
    CLASSES.get_or_init(py, || PyDict::new(py).unbind()).bind(py)
}

/// Decorates a dataclass: the core answers with instances of it where it has a result of that name.
#[pyfunction]
pub(crate) fn result<'py>(cls: Bound<'py, PyType>) -> PyResult<Bound<'py, PyType>> {
    classes(cls.py()).set_item(cls.name()?, &cls)?;
    Ok(cls)
}

/// An instance of the dataclass of that name.
pub(crate) fn build<'py>(name: &str, fields: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
    match classes(fields.py()).get_item(name)? {
        Some(class) => class.call((), Some(fields)),
        None => Err(PyRuntimeError::new_err(format!("no class for {name}: import wlb, not wlb._core alone"))),
    }
}

/// `answer!(py, "Class", source { field, method(), ...; field: value, ... })`: a result whose fields have the values of the source's
/// fields and methods of the same name, and these, each converted by itself.
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
        $crate::results::build($class, &fields)
    }};
}
pub(crate) use answer;
