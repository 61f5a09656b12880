//! Plain JSON values of Python, and their text: as `json.dumps` and `json.loads`, which do not listen to signals.
//! States may have tens of millions of numbers.

use std::cell::RefCell;
use std::fmt;

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};

/// Values between two looks for signals: some milliseconds.
const PART: usize = 1 << 16;
/// Containers in one another; a state has a few.
const MOST_DEPTH: usize = 64;

/// Why there is no text.
pub(crate) enum Problem {
    /// What was given is no plain JSON value.
    Value(String),
    /// A signal's handler raised, or the value's own code did.
    Raised(PyErr),
}

impl From<PyErr> for Problem {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// The text of a value. Another thread or a handler may change it meanwhile; then it is of the one or the other.
pub(crate) fn dumps(value: &Bound<'_, PyAny>) -> Result<String, Problem> {
    let mut text = Vec::new();
    write(value, &mut text, MOST_DEPTH)?;
    String::from_utf8(text).map_err(|problem| Problem::Value(problem.to_string()))
}

fn write(value: &Bound<'_, PyAny>, text: &mut Vec<u8>, depth: usize) -> Result<(), Problem> {
    let refuse = |problem: &str| Err(Problem::Value(problem.to_owned()));
    let Some(depth) = depth.checked_sub(1) else {
        return refuse("it has no end, or is nested too deep");
    };
    if value.is_none() {
        text.extend(b"null");
    } else if let Ok(value) = value.cast::<PyBool>() {
        put(&value.is_true(), text);
    } else if value.is_instance_of::<PyInt>() {
        match (value.extract::<i64>(), value.extract::<u64>()) {
            (Ok(number), _) => put(&number, text),
            (_, Ok(number)) => put(&number, text),
            _ => return refuse("it has a number out of range"),
        }
    } else if let Ok(value) = value.cast::<PyFloat>() {
        match value.value() {
            number if number.is_finite() => put(&number, text),
            _ => return refuse("it has a number that is not finite"),
        }
    } else if let Ok(value) = value.cast::<PyString>() {
        write_text(value, text)?;
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        text.push(b'[');
        for (index, item) in value.try_iter()?.enumerate() {
            if index > 0 {
                text.push(b',');
            }
            if index % PART == PART - 1 {
                value.py().check_signals()?;
            }
            write(&item?, text, depth)?;
        }
        text.push(b']');
    } else if value.is_instance_of::<PyDict>() {
        text.push(b'{');
        // By its own `items`, if it is of a class that has some.
        for (index, pair) in value.call_method0("items")?.try_iter()?.enumerate() {
            let (key, item): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair?.extract()?;
            if index > 0 {
                text.push(b',');
            }
            match key.cast::<PyString>() {
                Ok(key) => write_text(key, text)?,
                Err(_) => return refuse("it has a key that is no text"),
            }
            text.push(b':');
            write(&item, text, depth)?;
        }
        text.push(b'}');
    } else {
        return refuse(&format!("{} is none", value.get_type().name()?));
    }
    Ok(())
}

fn write_text(value: &Bound<'_, PyString>, text: &mut Vec<u8>) -> Result<(), Problem> {
    let value = value.to_str().map_err(|problem| Problem::Value(problem.to_string()))?;
    put(&value, text);
    Ok(())
}

/// What JSON has, as JSON has it.
fn put(value: &impl serde::Serialize, text: &mut Vec<u8>) {
    // Cannot fail: memory takes all of it.
    let _ = serde_json::to_writer(text, value);
}

/// The value that a text of the core stands for.
pub(crate) fn loads<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    let raised = RefCell::new(None);
    let mut reader = serde_json::Deserializer::from_str(text);
    Reader { py, raised: &raised }.deserialize(&mut reader).map_err(|error| {
        // What is not raised is no JSON, which the core does not write.
        raised.take().unwrap_or_else(|| PyValueError::new_err(error.to_string()))
    })
}

/// Makes Python's values of what is read; what Python raises meanwhile is in `raised`.
#[derive(Clone, Copy)]
struct Reader<'a, 'py> {
    py: Python<'py>,
    raised: &'a RefCell<Option<PyErr>>,
}

impl<'py> Reader<'_, 'py> {
    fn made<T, E: Error>(self, made: PyResult<T>) -> Result<T, E> {
        made.map_err(|error| {
            *self.raised.borrow_mut() = Some(error);
            E::custom("raised")
        })
    }
}

impl<'de, 'py> DeserializeSeed<'de> for Reader<'_, 'py> {
    type Value = Bound<'py, PyAny>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Methods that take a number, a text or the like, and make Python's own of it.
macro_rules! visits {
    ($($name:ident: $type:ty),+) => {
        $(
            fn $name<E: Error>(self, value: $type) -> Result<Self::Value, E> {
                self.made(value.into_bound_py_any(self.py))
            }
        )+
    };
}

impl<'de, 'py> Visitor<'de> for Reader<'_, 'py> {
    type Value = Bound<'py, PyAny>;

    visits!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(self.py.None().into_bound(self.py))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let list = PyList::empty(self.py);
        while let Some(item) = items.next_element_seed(self)? {
            self.made(list.append(item))?;
            if list.len() % PART == 0 {
                self.made(self.py.check_signals())?;
            }
        }
        Ok(list.into_any())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let dict = PyDict::new(self.py);
        while let Some(name) = items.next_key::<String>()? {
            let value = items.next_value_seed(self)?;
            self.made(dict.set_item(name, value))?;
        }
        Ok(dict.into_any())
    }
}
