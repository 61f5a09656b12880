//! Cost models in the golden files, as the arguments of `wlb.CostModel` or of its `from_tables`.

use serde::{Deserialize, Serialize};
use wlb_core::cost::Rates;
use wlb_core::{CostModel, Mask};

use crate::common::strategies::checked;

pub(crate) fn mask(causal: bool) -> Mask {
    if causal { Mask::Causal } else { Mask::Full }
}

#[derive(Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Cost {
    Rates {
        attention: f64,
        linear: f64,
        causal: bool,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        windows: Vec<(i32, f64)>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        chunks: Vec<(i32, f64)>,
        #[serde(skip_serializing_if = "Option::is_none")]
        document: Option<f64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        micro_batch: Option<f64>,
    },
    Tables {
        lengths: Vec<i32>,
        attention_seconds: Vec<f64>,
        linear_seconds: Vec<f64>,
        causal: bool,
    },
}

impl Cost {
    pub(crate) fn model(&self) -> CostModel {
        match self {
            Self::Rates { attention, linear, causal, windows, chunks, document, micro_batch } => {
                CostModel::from_rates(&Rates {
                    attention: *attention,
                    linear: *linear,
                    mask: mask(*causal),
                    windows: windows.clone(),
                    chunks: chunks.clone(),
                    document: document.unwrap_or(0.0),
                    micro_batch: micro_batch.unwrap_or(0.0),
                    unit: None,
                })
            }
            Self::Tables { lengths, attention_seconds, linear_seconds, causal } => {
                CostModel::from_tables(&checked(lengths), attention_seconds, linear_seconds, mask(*causal))
            }
        }
        .unwrap()
    }
}
