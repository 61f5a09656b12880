//! Shared by all classes of plain data: read-only properties, hashes, pickles.

use std::convert::Infallible;

use numpy::ndarray::IntoDimension;
use numpy::{Element, PyArray, PyArray1, PyArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Numbers that become a new array: a slice is copied, a vector is handed over.
pub(crate) struct Array<Values>(pub(crate) Values);

impl<'py, T: Element> IntoPyObject<'py> for Array<Vec<T>> {
    type Target = PyArray1<T>;
    type Output = Bound<'py, Self::Target>;
    type Error = Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Infallible> {
        Ok(PyArray1::from_vec(py, self.0))
    }
}

impl<'py, T: Element> IntoPyObject<'py> for Array<&[T]> {
    type Target = PyArray1<T>;
    type Output = Bound<'py, Self::Target>;
    type Error = Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Infallible> {
        Ok(PyArray1::from_slice(py, self.0))
    }
}

/// An array of one number for each of `items`.
pub(crate) fn column<S, T: Element>(items: &[S], number: impl Fn(&S) -> T) -> Array<Vec<T>> {
    Array(items.iter().map(number).collect())
}

/// Numbers in C order, and the shape of the new array that they become.
pub(crate) struct Table<T, const DIMENSIONS: usize = 2>(pub(crate) Vec<T>, pub(crate) [usize; DIMENSIONS]);

impl<'py, T: Element, const DIMENSIONS: usize> IntoPyObject<'py> for Table<T, DIMENSIONS>
where
    [usize; DIMENSIONS]: IntoDimension,
{
    type Target = PyArray<T, <[usize; DIMENSIONS] as IntoDimension>::Dim>;
    type Output = Bound<'py, Self::Target>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        PyArray1::from_vec(py, self.0).reshape(self.1)
    }
}

/// Items that become a tuple.
pub(crate) struct Tuple<T>(pub(crate) Vec<T>);

impl<'py, T: IntoPyObject<'py>> IntoPyObject<'py> for Tuple<T> {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        PyTuple::new(py, self.0)
    }
}

/// `hashed_by!(Class: |object| key)`: the hash of an object is the hash of its key.
macro_rules! hashed_by {
    ($class:ty: |$this:ident| $key:expr) => {
        impl std::hash::Hash for $class {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                let $this = self;
                $key.hash(state);
            }
        }
    };
}
pub(crate) use hashed_by;

/// `pickled_as_json!(Class(core::Type))`: the pickle of an object is the JSON text of the core object inside it.
macro_rules! pickled_as_json {
    ($class:ident($core:ty)) => {
        #[pymethods]
        impl $class {
            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<$crate::plain::Pickle<'py, (String,)>> {
                Ok((slf.get_type().getattr("_from_json")?, (slf.get().0.to_json(),)))
            }

            #[staticmethod]
            fn _from_json(json: &str) -> PyResult<Self> {
                <$core>::from_json(json).map(|core| Self(core.into())).map_err($crate::error::raise)
            }
        }
    };
}
pub(crate) use pickled_as_json;

/// Instructions to make an object again from its pickle: a callable and its arguments.
pub(crate) type Pickle<'py, Arguments> = (Bound<'py, PyAny>, Arguments);

/// The pickle of a part of `owner`: a call of this method of `owner`.
pub(crate) fn pickled_as_part<'py, Arguments>(
    py: Python<'py>,
    owner: impl IntoPyObjectExt<'py>,
    method: &str,
    arguments: Arguments,
) -> PyResult<Pickle<'py, Arguments>> {
    Ok((owner.into_bound_py_any(py)?.getattr(method)?, arguments))
}
