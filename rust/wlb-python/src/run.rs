//! The core at work: without the GIL, and listening to signals.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use wlb_core::interruptible;

use crate::error::raise;

/// Pieces of documents, micro-batches and the like from which on the GIL is released: with fewer, the work takes less
/// time than another thread needs to wake up.
pub(crate) const DETACH_FROM: usize = 1024;

/// How often a long call looks for signals. Taking the GIL back may mean to wait until another thread lets it go.
const INTERVAL: Duration = Duration::from_millis(100);

thread_local! {
    static CALLED_OUT: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread runs Python code of the user's, as a signal handler, in the middle of a call.
pub(crate) fn is_called_out() -> bool {
    CALLED_OUT.get()
}

/// Runs Python code of the user's in the middle of a call: what it asks of that call's object must not wait for the
/// call.
pub(crate) fn calling_out<T>(code: impl FnOnce() -> T) -> T {
    let outer = CALLED_OUT.replace(true);
    let done = code();
    CALLED_OUT.set(outer);
    done
}

/// Runs the core, without the GIL if there is enough to do. Signal handlers run meanwhile; what one of them raises
/// (`KeyboardInterrupt`) ends the work.
///
/// # Arguments
/// * `size` - how much there is to do: documents and what else takes about as long as one.
/// * `work` - is left where it is when it is ended, so what it changes has to be its own.
pub(crate) fn run<T: Send>(py: Python<'_>, size: usize, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let raised = Arc::new(Mutex::new(None));
    let for_check = Arc::clone(&raised);
    let listening = move || {
        let last = Cell::new(Instant::now());
        let check = move || {
            if last.get().elapsed() < INTERVAL {
                return false;
            }
            let error = Python::attach(|py| handle_signals(py).err());
            last.set(Instant::now());
            let stop = error.is_some();
            *for_check.lock().unwrap_or_else(PoisonError::into_inner) = error;
            stop
        };
        interruptible(check, AssertUnwindSafe(work))
    };
    let done = if size < DETACH_FROM { listening() } else { py.detach(listening) };
    let done = done.map_err(|error| {
        let raised = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or_else(|| raise(error))
    })?;
    if size >= DETACH_FROM {
        // A signal that came since the last look: else Python would raise after the caller has taken over what was
        // done, and the result would be lost.
        handle_signals(py)?;
    }
    Ok(done)
}

/// Runs the handlers of signals that came; gives what one of them raises.
fn handle_signals(py: Python<'_>) -> PyResult<()> {
    calling_out(|| py.check_signals())
}
