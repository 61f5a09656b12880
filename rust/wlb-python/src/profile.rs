//! The text of a measured profile. Which names came with wlb, and where their files lie, only Python knows: it passes
//! the function that reads them down when `wlb` is imported.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static READER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Sets what `from_profile` reads with: a function of a path or name that returns the profile's text. The first one stays.
#[pyfunction]
pub(crate) fn set_profile_reader(py: Python<'_>, reader: Py<PyAny>) {
    let _ = READER.set(py, reader);
}

/// The text of a profile: a path, or a name that came with wlb.
pub(crate) fn read_profile(path_or_name: &Bound<'_, PyAny>) -> PyResult<String> {
    let reader = READER.get(path_or_name.py());
    let reader = reader.ok_or_else(|| PyRuntimeError::new_err("wlb._core has no profile reader: import wlb first"))?;
    reader.bind(path_or_name.py()).call1((path_or_name,))?.extract()
}
