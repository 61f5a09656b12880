//! What a pipeline rank runs, one after the other.

/// What an op computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Forward.
    Forward = 0,
    /// Gradients of input and weights together.
    Backward = 1,
    /// The gradient of the input: what the stage before waits for.
    InputGradient = 2,
    /// The gradient of the weights: nobody waits for it inside the step.
    WeightGradient = 3,
}

/// One pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Which pass.
    pub kind: Kind,
    /// Which micro-batch.
    pub micro_batch: u32,
    /// Which stage of the model, from 0 (the embedding) on; not which rank.
    pub stage: u32,
}
