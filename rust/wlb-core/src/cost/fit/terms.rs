//! Amounts of a cost model's terms in micro-batches, and the cost model that fits their times.

use crate::cost::mask::{LocalMask, Mask};
use crate::cost::model::CostModel;
use crate::cost::rates::{Rates, Unit, check_local, hides_nothing};
use crate::error::{Error, Result};

use super::select::{Column, Fit, fit_rates};

/// The terms that a fit tries, in the order in which a cost model lists them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FitOptions {
    /// The mask: the keys that a query attends to.
    pub mask: Mask,
    /// Keys of sliding windows, ascending.
    pub windows: Vec<i32>,
    /// Tokens of chunks, ascending.
    pub chunks: Vec<i32>,
    /// Names of [`FitOptions::NAMES`] to try; `None`: all.
    pub terms: Option<Vec<String>>,
    /// Number of ranks that share the pairs and tokens of each micro-batch; every rank has a part of every document.
    /// `None`: one rank for each micro-batch.
    pub ranks: Option<Vec<i64>>,
}

impl FitOptions {
    /// Terms other than windows and chunks.
    pub const NAMES: &[&str] = &["pairs", "tokens", "documents", "micro_batches"];
}

#[derive(Clone, Copy, PartialEq)]
enum Term {
    Tokens,
    Pairs(Mask),
    Local(LocalMask),
    Documents,
    MicroBatches,
}

impl Term {
    fn name(self) -> String {
        match self {
            Self::Tokens => "tokens".to_owned(),
            Self::Pairs(_) => "pairs".to_owned(),
            Self::Local(LocalMask::Window(size)) => format!("window_pairs[{size}]"),
            Self::Local(LocalMask::Chunk(size)) => format!("chunk_pairs[{size}]"),
            Self::Documents => "documents".to_owned(),
            Self::MicroBatches => "micro_batches".to_owned(),
        }
    }

    /// Work of the term on each rank of a micro-batch.
    fn work(self, lengths: &[i32], ranks: f64) -> f64 {
        match self {
            Self::Tokens => lengths.iter().map(|&length| f64::from(length)).sum::<f64>() / ranks,
            Self::Pairs(mask) => lengths.iter().map(|&length| mask.pairs_f64(length)).sum::<f64>() / ranks,
            Self::Local(mask) => lengths.iter().map(|&length| mask.pairs_f64(length)).sum::<f64>() / ranks,
            Self::Documents => lengths.len() as f64,
            Self::MicroBatches => 1.0,
        }
    }
}

impl CostModel {
    /// The cost model, in seconds, that explains measured times of micro-batches. [`fit_rates`] describes the method.
    ///
    /// If the times cannot tell terms apart, the last of them in this order is given up: tokens, pairs, windows,
    /// chunks, documents, micro-batches.
    ///
    /// # Arguments
    /// * `micro_batches` - lengths of the documents in each; may be empty.
    /// * `seconds` - measured time of each.
    ///
    /// # Returns
    /// The model, and the fit with its terms in the model's order.
    ///
    /// # Errors
    /// The errors of [`fit_rates`]; [`Error::Choice`] for an unknown term; [`Error::Entry`] or [`Error::Combination`]
    /// if the micro-batches cannot show a term, or the times do not grow with the documents.
    ///
    /// # Complexity
    /// The time of [`fit_rates`], and O(documents) for each term.
    pub fn fit(micro_batches: &[&[i32]], seconds: &[f64], options: &FitOptions) -> Result<(Self, Fit)> {
        let terms = terms_of(options)?;
        if seconds.len() != micro_batches.len() {
            let (found, expected) = (seconds.len(), micro_batches.len());
            return Err(Error::Mismatch { argument: "seconds", found, other: "micro_batches", expected });
        }
        if let Some(ranks) = &options.ranks {
            if ranks.len() != micro_batches.len() {
                let (found, expected) = (ranks.len(), micro_batches.len());
                return Err(Error::Mismatch { argument: "ranks", found, other: "micro_batches", expected });
            }
            if let Some(index) = ranks.iter().position(|&count| count < 1) {
                let (argument, requirement) = ("ranks", "must be an integer from 1 on");
                return Err(Error::Entry { argument, index, value: ranks[index] as f64, requirement });
            }
        }
        if !terms.contains(&Term::MicroBatches)
            && let Some(index) = micro_batches.iter().position(|lengths| lengths.is_empty())
        {
            let requirement = "documents: an empty micro-batch has a time only with the term \"micro_batches\"";
            return Err(Error::Entry { argument: "micro_batches", index, value: 0.0, requirement });
        }
        let mut lengths = micro_batches.iter().copied().flatten();
        let first = lengths.next();
        if first.is_some() && lengths.all(|length| Some(length) == first) {
            let requirement = "all documents have the same length: measure other lengths, too, to tell terms apart";
            return Err(Error::Combination { argument: "micro_batches", requirement });
        }
        let column = |&term: &Term| {
            let work = micro_batches.iter().enumerate().map(|(row, lengths)| {
                term.work(lengths, options.ranks.as_ref().map_or(1.0, |ranks| ranks[row] as f64))
            });
            Column { work: work.collect(), name: term.name() }
        };
        let columns: Vec<Column> = terms.iter().map(column).collect();
        let mut fit = fit_rates(&columns, seconds)?;

        let rate = |term: Term| terms.iter().position(|&other| other == term).map_or(0.0, |at| fit.terms[at].rate);
        let local = |sizes: &[i32], mask: fn(i32) -> LocalMask| {
            sizes.iter().map(|&size| (size, rate(Term::Local(mask(size))))).collect()
        };
        let rates = Rates {
            attention: rate(Term::Pairs(options.mask)),
            linear: rate(Term::Tokens),
            mask: options.mask,
            windows: local(&options.windows, LocalMask::Window),
            chunks: local(&options.chunks, LocalMask::Chunk),
            document: rate(Term::Documents),
            micro_batch: rate(Term::MicroBatches),
            unit: Some(Unit::Seconds),
        };
        let model = Self::from_rates(&rates).map_err(|_| Error::Combination {
            argument: "seconds",
            requirement: "do not grow with the documents: every micro-batch takes equally long",
        })?;
        list_as_a_model_does(&mut fit);
        Ok((model, fit))
    }
}

/// The terms to try, in order of preference: of several that cannot be told apart, the last is given up.
fn terms_of(options: &FitOptions) -> Result<Vec<Term>> {
    for name in options.terms.iter().flatten() {
        if !FitOptions::NAMES.contains(&name.as_str()) {
            let choices = FitOptions::NAMES.iter().map(|choice| format!("{choice:?}")).collect::<Vec<_>>().join(", ");
            return Err(Error::Choice { argument: "terms", value: name.clone(), choices });
        }
    }
    let unweighted = |sizes: &[i32]| sizes.iter().map(|&size| (size, 0.0)).collect::<Vec<_>>();
    check_local("windows", &unweighted(&options.windows), options.mask)?;
    check_local("chunks", &unweighted(&options.chunks), options.mask)?;
    let pairs = Term::Pairs(options.mask);
    let local = |sizes: &[i32], mask: fn(i32) -> LocalMask| {
        sizes.iter().map(|&size| if hides_nothing(size) { pairs } else { Term::Local(mask(size)) }).collect::<Vec<_>>()
    };
    let (windows, chunks) = (local(&options.windows, LocalMask::Window), local(&options.chunks, LocalMask::Chunk));
    let asked = |term: &Term| {
        windows.contains(term)
            || chunks.contains(term)
            || options.terms.as_ref().is_none_or(|names| names.contains(&term.name()))
    };
    let is_local = |term: &Term| matches!(term, Term::Local(_));
    let terms: Vec<Term> = [Term::Tokens, pairs]
        .into_iter()
        .chain(windows.iter().chain(&chunks).copied().filter(is_local))
        .chain([Term::Documents, Term::MicroBatches])
        .filter(asked)
        .collect();
    if terms.iter().all(|&term| term == Term::MicroBatches) {
        let requirement = "must include a cost of documents, not only \"micro_batches\"";
        return Err(Error::Combination { argument: "terms", requirement });
    }
    Ok(terms)
}

/// Puts the tokens after all pairs, as a cost model lists its terms.
fn list_as_a_model_does(fit: &mut Fit) {
    let place = |name: &str| ["tokens", "documents", "micro_batches"].iter().position(|&other| other == name);
    fit.terms.sort_by_key(|term| place(&term.name));
    fit.merged.iter_mut().for_each(|group| group.sort_by_key(|name| place(name)));
}
