//! numpy in, numpy out.

use std::ops::RangeInclusive;
use std::str::FromStr;

use numpy::{PyArray1, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyMapping};
use wlb_core::Lengths;

use crate::error::{raise, refuse};

/// Lengths that are copied at a time, so that the copy stays in a cache until it is checked.
const PART: usize = 1 << 16;

/// Lengths of documents: copied, and the copy checked, because other threads may write to the array; numpy does so
/// without the GIL.
pub(crate) fn read_lengths(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Lengths> {
    let Some(values) = int64_values(object) else {
        return Lengths::new(argument, &integers(argument, object)?).map_err(raise);
    };
    let mut lengths = Lengths::with_capacity(values.len());
    let mut copy = Vec::with_capacity(values.len().min(PART));
    for part in values.chunks(PART) {
        copy.clear();
        copy.extend_from_slice(part);
        lengths.extend(argument, &copy).map_err(raise)?;
    }
    // So many take some tenths of a second each time that they are passed over. Not within the loop: a handler may do
    // anything, also to the array.
    object.py().check_signals()?;
    Ok(lengths)
}

/// The values of an int64 array where they lie.
fn int64_values<'a>(object: &'a Bound<'_, PyAny>) -> Option<&'a [i64]> {
    let array = object.cast_exact::<PyArray1<i64>>().ok()?;
    // SAFETY: read once, by who asks, with the GIL. That the memory is aligned and contiguous is checked.
    unsafe { array.as_slice() }.ok()
}

/// Any int64 values, copied.
pub(crate) fn integers(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Some(values) = int64_values(object) {
        return Ok(values.to_vec());
    }
    let array = as_array(argument, object, 1..=1)?;
    match kind(&array)? {
        'u' if array.dtype().itemsize() < 8 => {}
        'i' => {}
        // What numpy makes of an empty list.
        'f' | 'O' | 'u' if array.is_empty() => return Ok(Vec::new()),
        // The one integer type that int64 cannot hold, Python's integers, and what has no place here.
        _ => return item_by_item(argument, object, &array),
    }
    // A copy: in native byte order, aligned, contiguous.
    let native = array.call_method1("astype", ("int64",))?;
    Ok(native.cast::<PyArray1<i64>>()?.to_vec()?)
}

/// Any float64 values.
pub(crate) fn floats(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    Ok(floats_of_shape(argument, object, 1..=1)?.0)
}

/// Any float64 values with so many dimensions, in C order, and the shape. Copied.
pub(crate) fn floats_of_shape(
    argument: &'static str,
    object: &Bound<'_, PyAny>,
    dimensions: RangeInclusive<usize>,
) -> PyResult<(Vec<f64>, Vec<usize>)> {
    if let Ok(array) = object.cast_exact::<PyArrayDyn<f64>>()
        && dimensions.contains(&array.ndim())
        && array.is_c_contiguous()
        // SAFETY: read once, here, with the GIL. That the memory is aligned and contiguous is checked.
        && let Ok(values) = unsafe { array.as_slice() }
    {
        return Ok((values.to_vec(), array.shape().to_vec()));
    }
    let array = as_array(argument, object, dimensions)?;
    if !"iuf".contains(kind(&array)?) {
        return Err(refuse(argument, None, Some(object), format!("must be real numbers, not {}", array.dtype())));
    }
    // A copy: in native byte order, aligned, contiguous.
    let converted =
        array.call_method1("astype", ("float64", "C")).map_err(|error| unreadable(argument, object, error))?;
    Ok((converted.cast::<PyArrayDyn<f64>>()?.to_vec()?, array.shape().to_vec()))
}

/// Any float64 values of one dimension or two, with so many rows and columns. Copied.
pub(crate) fn floats_by_row(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<(Vec<f64>, usize, usize)> {
    let (values, shape) = floats_of_shape(argument, object, 1..=2)?;
    Ok((values, shape[0], shape.get(1).copied().unwrap_or(1)))
}

/// One whole number; a bool is none.
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

/// Rates by size, ascending, of a mapping; None is an empty one.
pub(crate) fn rates_by_size(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<(i32, f64)>> {
    if object.is_none() {
        return Ok(Vec::new());
    }
    let Ok(mapping) = object.cast::<PyMapping>() else {
        return Err(refuse(argument, None, Some(object), "must be a mapping of sizes to rates"));
    };
    let entry = |entry: Bound<'_, PyAny>| {
        let (size, rate): (Bound<'_, PyAny>, Bound<'_, PyAny>) = entry.extract()?;
        Ok((positive(argument, &size)?, real(argument, &rate)?))
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
    let mut sizes = listed.map(|size| positive(argument, &size?)).collect::<PyResult<Vec<_>>>()?;
    sizes.sort_unstable();
    Ok(sizes)
}

/// One real number; a bool is none, nor is a complex number.
pub(crate) fn real(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<f64> {
    let of_numpy = object.getattr("dtype").and_then(|dtype| dtype.getattr("kind")?.extract::<String>());
    let is_real = !object.is_instance_of::<PyBool>() && of_numpy.map_or(true, |kind| "iuf".contains(&kind));
    match object.extract() {
        Ok(value) if is_real => Ok(value),
        _ => Err(refuse(argument, None, Some(object), "must be a real number")),
    }
}

/// True or False; a number is neither.
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

/// A number of things, from 1 to `most`.
pub(crate) fn count(argument: &'static str, object: &Bound<'_, PyAny>, most: usize) -> PyResult<usize> {
    size(argument, object, 1, most as i64)
}

/// A number of tokens, from 1 to 2^31 - 1.
pub(crate) fn positive(argument: &'static str, object: &Bound<'_, PyAny>) -> PyResult<i32> {
    size(argument, object, 1, wlb_core::limits::MAX_TOKENS).map(|tokens| tokens as i32)
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

/// One of the choices that the core has under a name.
pub(crate) fn choice<T: FromStr<Err = wlb_core::Error>>(name: &str) -> PyResult<T> {
    name.parse().map_err(raise)
}

/// Any array or sequence with so many dimensions, as a numpy array of whatever dtype numpy gives it.
fn as_array<'py>(
    argument: &'static str,
    object: &Bound<'py, PyAny>,
    dimensions: RangeInclusive<usize>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let numpy = object.py().import("numpy")?;
    // `asarray` would drop the mask, and pack what the caller masked out.
    if object.is_instance_of::<PyUntypedArray>() && object.is_instance(&numpy.getattr("ma")?.getattr("MaskedArray")?)? {
        return Err(refuse(argument, None, None, "is a masked array: fill it or drop what is masked"));
    }
    let array = numpy.call_method1("asarray", (object,)).map_err(|error| unreadable(argument, object, error))?;
    let array = array.cast_into::<PyUntypedArray>()?;
    if dimensions.contains(&array.ndim()) {
        return Ok(array);
    }
    let shape = array.shape().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let wanted = match dimensions.into_inner() {
        (least, most) if least == most => format!("{least}"),
        (least, most) => format!("{least}- to {most}"),
    };
    let problem = format!("must be {wanted}-dimensional, but its shape is ({shape})");
    Err(refuse(argument, None, None, problem))
}

/// Whether this is an integer of Python, numpy or another library; a bool is none.
fn is_integer(item: &Bound<'_, PyAny>) -> PyResult<bool> {
    if item.is_instance_of::<PyBool>() {
        return Ok(false);
    }
    if item.is_instance_of::<PyInt>() {
        return Ok(true);
    }
    // Only integers have an index; a tensor has one too, which fails if it holds anything else.
    Ok(item.hasattr("__index__")? && item.call_method0("__index__").is_ok())
}

/// numpy's one-letter kind of a dtype.
fn kind(array: &Bound<'_, PyUntypedArray>) -> PyResult<char> {
    array.dtype().getattr("kind")?.extract()
}

/// What numpy could not read is wrong input; running out of memory or a keyboard interrupt is not.
fn unreadable(argument: &'static str, object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    if !error.is_instance_of::<pyo3::exceptions::PyException>(py) || error.is_instance_of::<PyMemoryError>(py) {
        return error;
    }
    refuse(argument, None, Some(object), format!("is no array of numbers ({error})"))
}

/// Element by element, so that an error can name the culprit: dtypes that are not plain integers are wrong input,
/// except Python integers in an object array.
fn item_by_item(
    argument: &'static str,
    object: &Bound<'_, PyAny>,
    array: &Bound<'_, PyUntypedArray>,
) -> PyResult<Vec<i64>> {
    // What the caller wrote, where that can be listed: numpy turns a list with 2**63 in it into floats.
    let written = object.try_iter().is_ok() && !object.is_instance_of::<PyUntypedArray>();
    let list = if written { object.clone() } else { array.call_method0("tolist")? };
    let items = list.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let mut values = Vec::with_capacity(items.len());
    let mut not_an_integer = None;
    for (index, item) in items.iter().enumerate() {
        if index.is_multiple_of(1 << 16) {
            object.py().check_signals()?;
        }
        if is_integer(item)? {
            let too_large = |_| refuse(argument, Some(index), Some(item), "does not fit into int64");
            values.push(item.extract::<i64>().map_err(too_large)?);
        } else if item.extract::<f64>().is_ok_and(|value| value.fract() == 0.0) {
            // Blame a fraction or NaN behind it first, if there is one.
            not_an_integer.get_or_insert(index);
        } else {
            return Err(refuse(argument, Some(index), Some(item), "must be an integer"));
        }
    }
    match not_an_integer {
        None if "uOf".contains(kind(array)?) => Ok(values),
        // numpy lists dates and time spans as integers.
        None => Err(refuse(argument, None, None, format!("must be integers, not {}", array.dtype()))),
        Some(index) => {
            let problem = format!("must be an integer, but the array has dtype {}", array.dtype());
            Err(refuse(argument, Some(index), Some(&items[index]), problem))
        }
    }
}
