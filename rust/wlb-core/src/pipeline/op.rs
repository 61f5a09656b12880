//! Ops of a pipeline rank.

/// Pass that an op computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Forward pass.
    Forward = 0,
    /// Gradients of input and weights together.
    Backward = 1,
    /// The gradient of the input, for which the stage before waits.
    InputGradient = 2,
    /// The gradient of the weights, for which no stage waits inside the step.
    WeightGradient = 3,
}

/// One pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// The pass.
    pub kind: Kind,
    /// The micro-batch.
    pub micro_batch: u32,
    /// Stage of the model, from 0 (the embedding); not the rank.
    pub stage: u32,
}
