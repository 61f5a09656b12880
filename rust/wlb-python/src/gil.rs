//! The GIL during work of the core.

use pyo3::prelude::*;

/// Documents, micro-batches and the like from which on the GIL is released: with fewer, the work takes less time than
/// another thread needs to wake up.
pub(crate) const RELEASE_FROM: usize = 1024;

/// Runs the core, without the GIL if there is enough to do.
///
/// # Arguments
/// * `size` - how much there is to do: documents, and what else takes about as long as a document.
/// * `work` - touches no Python object.
pub(crate) fn run<T: Send>(py: Python<'_>, size: usize, work: impl FnOnce() -> T + Send) -> T {
    if size < RELEASE_FROM { work() } else { py.detach(work) }
}
