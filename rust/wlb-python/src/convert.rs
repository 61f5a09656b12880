//! Reads numpy arrays: arrays of the wanted dtype here, all other objects by `wlb._arrays`, which is written in Python.

use std::ops::RangeInclusive;
use std::str::FromStr;

use numpy::{Element, PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyMapping};
use wlb_core::Lengths;
use wlb_core::limits::MAX_TOKENS;

use crate::error::{raise, refuse};
use crate::results::declaration;

/// Numbers that are read at a time, so that their copy is still in a cache when it is checked.
const PART: usize = 1 << 16;

/// Lengths of documents. They are copied and the copy is checked, because other threads may write to the array: numpy
/// does that without the GIL.
pub(crate) fn read_lengths(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Lengths> {
    match object.cast_exact::<PyArrayDyn<i32>>() {
        // A micro-batch's lengths have this dtype.
        Ok(array) if array.ndim() == 1 && is_plain(array) => lengths_of(argument, array),
        _ => lengths_of(argument, &int64_array(argument, object)?),
    }
}

fn lengths_of<T: Element + Copy + Into<i64>>(
    argument: &'static str,
    array: &Bound<'_, PyArrayDyn<T>>,
) -> PyResult<Lengths> {
    let mut lengths = Lengths::with_capacity(array.len());
    let mut copy = Vec::with_capacity(array.len().min(PART));
    // SAFETY: the GIL is held and no Python code runs meanwhile; `as_slice` checks that memory is aligned and
    // contiguous.
    for part in unsafe { array.as_slice() }?.chunks(PART) {
        copy.clear();
        copy.extend(part.iter().map(|&length| length.into()));
        lengths.extend(argument, &copy).map_err(raise)?;
    }
    Ok(lengths)
}

/// A copy of any int64 values.
pub(crate) fn integers(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    copied(&int64_array(argument, object)?)
}

/// An int64 array unchanged; any other object converted to one.
pub(crate) fn int64_array<'py>(
    argument: &'static str,
    object: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArrayDyn<i64>>> {
    match object.cast_exact::<PyArrayDyn<i64>>() {
        Ok(array) if array.ndim() == 1 && is_plain(array) => Ok(array.clone()),
        _ => Ok(declaration(object.py(), "wlb._arrays.integers")?.call1((argument, object))?.cast_into()?),
    }
}

/// Whether the array is contiguous in memory.
pub(crate) fn is_plain<T: Element>(array: &Bound<'_, PyArrayDyn<T>>) -> bool {
    // SAFETY: no element is read; `as_slice` checks that memory is aligned and contiguous.
    array.is_c_contiguous() && unsafe { array.as_slice() }.is_ok()
}

fn copied<T: Element + Copy>(array: &Bound<'_, PyArrayDyn<T>>) -> PyResult<Vec<T>> {
    // SAFETY: the GIL is held and no Python code runs meanwhile; `as_slice` checks that memory is aligned and
    // contiguous.
    Ok(unsafe { array.as_slice() }?.to_vec())
}

/// A copy of any float64 values of one dimension.
pub(crate) fn floats(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    Ok(floats_of_shape(argument, object, 1..=1)?.0)
}

/// A copy of any float64 values with this number of dimensions, in C order, and its shape.
pub(crate) fn floats_of_shape(
    argument: &'static str,
    object: &Bound<'_, PyAny>,
    dimensions: RangeInclusive<usize>,
) -> PyResult<(Vec<f64>, Vec<usize>)> {
    let array = match object.cast_exact::<PyArrayDyn<f64>>() {
        Ok(array) if dimensions.contains(&array.ndim()) && is_plain(array) => array.clone(),
        _ => {
            let (least, most) = dimensions.into_inner();
            let array = declaration(object.py(), "wlb._arrays.floats")?.call1((argument, object, least, most))?;
            array.cast_into()?
        }
    };
    let shape = array.shape().to_vec();
    let values = copied(&array)?;
    if values.len() != shape.iter().product::<usize>() {
        return Err(refuse(argument, None, None, "was resized while it was read"));
    }
    Ok((values, shape))
}

/// A copy of any float64 values of one or two dimensions, and the numbers of rows and columns.
pub(crate) fn floats_by_row(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<(Vec<f64>, usize, usize)> {
    let (values, shape) = floats_of_shape(argument, object, 1..=2)?;
    Ok((values, shape[0], shape.get(1).copied().unwrap_or(1)))
}

/// One whole number; a bool is refused.
pub(crate) fn integer(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<i64> {
    if object.is_instance_of::<PyBool>() {
        return Err(refuse(argument, None, Some(object), "must be a whole number"));
    }
    if let Ok(value) = object.extract::<i64>() {
        return Ok(value);
    }
    let problem = if object.is_instance_of::<PyInt>() { "is out of range" } else { "must be a whole number" };
    Err(refuse(argument, None, Some(object), problem))
}

/// Rates by ascending size, from a mapping; None counts as an empty mapping.
pub(crate) fn rates_by_size(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<(i32, f64)>> {
    if object.is_none() {
        return Ok(Vec::new());
    }
    let Ok(mapping) = object.cast::<PyMapping>() else {
        return Err(refuse(argument, None, Some(object), "must be a mapping of sizes to rates"));
    };
    let entry = |entry: Bound<'_, PyAny>| {
        let (size, rate): (Bound<'_, PyAny>, Bound<'_, PyAny>) = entry.extract()?;
        Ok((extent(argument, &size)?, real(argument, &rate)?))
    };
    let mut rates = mapping.items()?.iter().map(entry).collect::<PyResult<Vec<_>>>()?;
    rates.sort_by_key(|&(size, _)| size);
    Ok(rates)
}

/// Sizes in tokens, in ascending order.
pub(crate) fn sizes(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i32>> {
    let Ok(listed) = object.try_iter() else {
        return Err(refuse(argument, None, Some(object), "must be a list of sizes"));
    };
    let mut sizes = listed.map(|size| extent(argument, &size?)).collect::<PyResult<Vec<_>>>()?;
    sizes.sort_unstable();
    Ok(sizes)
}

/// Tokens of a window or chunk. All sizes beyond the longest document become the same size.
fn extent(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<i32> {
    let is_longer = |size: Bound<'_, PyAny>| size.gt(MAX_TOKENS);
    if object.call_method0("__index__").and_then(is_longer).unwrap_or(false) {
        return Ok(MAX_TOKENS as i32);
    }
    positive(argument, object)
}

/// One real number; a bool or a complex number is refused.
pub(crate) fn real(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<f64> {
    let of_numpy = object.getattr("dtype").and_then(|dtype| dtype.getattr("kind")?.extract::<String>());
    let is_real = !object.is_instance_of::<PyBool>() && of_numpy.map_or(true, |kind| "iuf".contains(&kind));
    match object.extract() {
        Ok(value) if is_real => Ok(value),
        _ => Err(refuse(argument, None, Some(object), "must be a real number")),
    }
}

/// True or False; a number is refused.
pub(crate) fn flag(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<bool> {
    object.extract().map_err(|_| refuse(argument, None, Some(object), "must be True or False"))
}

/// One whole number in a range.
pub(crate) fn size(argument: &'static str, object: &Bound<'_, PyAny>, minimum: i64, maximum: i64) -> PyResult<usize> {
    let value = integer(argument, object)?;
    if (minimum..=maximum).contains(&value) {
        return Ok(value as usize);
    }
    Err(raise(wlb_core::Error::OutOfRange { argument, value, minimum, maximum }))
}

/// A count from 1 to `most`.
pub(crate) fn count(argument: &'static str, object: &Bound<'_, PyAny>, most: usize) -> PyResult<usize> {
    size(argument, object, 1, most as i64)
}

/// A number of tokens, from 1 to 2^31 - 1.
pub(crate) fn positive(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<i32> {
    size(argument, object, 1, MAX_TOKENS).map(|tokens| tokens as i32)
}

/// A number of iterations, 0 or above.
pub(crate) fn iterations(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<u64> {
    size(argument, object, 0, i64::MAX).map(|iterations| iterations as u64)
}

/// Integers that fit into int32.
pub(crate) fn narrow(argument: &'static str, object: &Bound<'_, PyAny>, requirement: &str) -> PyResult<Vec<i32>> {
    let narrow = |(index, value): (usize, i64)| {
        i32::try_from(value).map_err(|_| {
            let value = value.into_bound_py_any(object.py()).ok();
            refuse(argument, Some(index), value.as_ref(), requirement)
        })
    };
    integers(argument, object)?.into_iter().enumerate().map(narrow).collect()
}

/// The text of a measured profile: of a path, or of the name of a profile that comes with wlb.
pub(crate) fn profile(path_or_name: &Bound<'_, PyAny>) -> PyResult<String> {
    declaration(path_or_name.py(), "wlb.profiles.read")?.call1((path_or_name,))?.extract()
}

/// One of the choices that the core defines, from its name.
pub(crate) fn choice<T: FromStr<Err = wlb_core::Error>>(name: &str) -> PyResult<T> {
    name.parse().map_err(raise)
}
