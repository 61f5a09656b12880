//! Releases the GIL during long work of the core.

use pyo3::prelude::*;

/// Number of documents, micro-batches and the like from which on the GIL is released. With fewer, the work takes less
/// time than another thread needs to wake up.
pub(crate) const RELEASE_FROM: usize = 1024;

/// Runs work of the core, without the GIL if there is enough of it.
///
/// # Arguments
/// * `size` - amount of work: the number of documents, or of parts that take about as long as a document.
/// * `work` - must not touch Python objects.
pub(crate) fn run<T: Send>(py: Python<'_>, size: usize, work: impl FnOnce() -> T + Send) -> T {
    if size < RELEASE_FROM { work() } else { py.detach(work) }
}
