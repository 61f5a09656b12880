//! Long work that its caller can end.
//!
//! The crate knows neither clocks nor signals. Whoever does gives a check to [`interruptible`], and everything in here
//! that can be long asks it every few hundred thousand steps: some milliseconds. Where it says so, the work is left at
//! once by unwinding. That is no panic, no hook runs, and the many loops in between need no way to hand an error on.
//! What the work was changing is left half changed, so the work has to be [`UnwindSafe`]: it changes something of its
//! own, and who asked for it takes the result or nothing.
//!
//! A program that is built to abort on panics is never interrupted.

use std::cell::Cell;
use std::panic::{UnwindSafe, catch_unwind, resume_unwind};

use crate::error::{Error, Result};

/// Steps between two checks. A step is a few nanoseconds, or one access to memory that no cache holds.
pub(crate) const STEPS: usize = 1 << 18;

thread_local! {
    static CHECK: Cell<Option<Box<dyn Fn() -> bool>>> = const { Cell::new(None) };
}

/// What unwinding carries.
struct Interrupted;

/// Does some work of this crate, and ends it early when `check` says so.
///
/// # Arguments
/// * `check` - whether to stop; asked on this thread every few milliseconds, and never by work that takes less.
///
/// # Errors
/// [`Error::Interrupted`] if it was ended.
///
/// ```
/// use wlb_core::{CostModel, Error, Leftover, Lengths, Mask, Method, PackOptions, interruptible, pack};
///
/// let lengths = Lengths::new("lengths", &[1000; 1_000_000])?;
/// let cost = CostModel::analytic(1.0, 100.0, Mask::Causal)?;
/// let (method, leftover) = (Method::VarLength, Leftover::Error);
/// let options = PackOptions { num_micro_batches: 8, max_tokens: i32::MAX, method, global_batches: 1, leftover };
/// let stopped = interruptible(|| true, || pack(&lengths, &options, &cost));
/// assert_eq!(stopped.unwrap_err(), Error::Interrupted);
/// # Ok::<(), Error>(())
/// ```
pub fn interruptible<T>(check: impl Fn() -> bool + 'static, work: impl FnOnce() -> T + UnwindSafe) -> Result<T> {
    let outer = CHECK.replace(Some(Box::new(check)));
    let done = catch_unwind(work);
    CHECK.set(outer);
    done.or_else(|payload| match payload.downcast::<Interrupted>() {
        Ok(_) => Err(Error::Interrupted),
        Err(panic) => resume_unwind(panic),
    })
}

/// Leaves the work if its caller wants that. For what takes far longer than a function call.
pub(crate) fn check() {
    // Taken out while it is asked: it may do work of this crate, which is its own and not what it is asked about.
    let Some(check) = CHECK.take() else { return };
    let stop = check();
    CHECK.set(Some(check));
    if cfg!(panic = "unwind") && stop {
        resume_unwind(Box::new(Interrupted));
    }
}

/// Steps of a loop, counted until the next check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    left: usize,
}

impl Default for Meter {
    fn default() -> Self {
        Self { left: STEPS }
    }
}

impl Meter {
    /// Counts some steps, and leaves the work if its caller wants that.
    #[inline]
    pub(crate) fn spend(&mut self, steps: usize) {
        match self.left.checked_sub(steps) {
            Some(left) => self.left = left,
            None => self.ask(),
        }
    }

    #[cold]
    #[inline(never)]
    fn ask(&mut self) {
        *self = Self::default();
        check();
    }
}

/// The parts of a long slice, with a check before each.
pub(crate) fn parts<T>(slice: &[T]) -> impl Iterator<Item = &[T]> {
    slice.chunks(STEPS).enumerate().map(|(index, part)| {
        // What is short is done before anybody could want to end it.
        if index > 0 {
            check();
        }
        part
    })
}
