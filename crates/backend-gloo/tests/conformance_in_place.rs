//! Gloo against the one suite over shared memory, with tensors that the ranks read in each other's memory: each call's are copied into what
//! `ProcessGroup::alloc` gives. In some calls some rank keeps an ordinary one.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use backend_gloo::GlooGroup;
use conformance::{Limit, Mode, Plan};
use ftcore::{
    Capabilities, Checked, Collective, Completion, Device, Failed, Feature, OpKind, ProcessGroup, Rejected,
    Result, SubmitOptions, Work, Wrapper, execute_by_submit,
};

struct InPlace {
    inner: Box<dyn ProcessGroup>,
    capabilities: Capabilities,
    calls: AtomicU32,
}

impl InPlace {
    fn new(inner: Box<dyn ProcessGroup>) -> Self {
        let mut capabilities = inner.capabilities().clone();
        // What comes back is not what was lent.
        capabilities.features = capabilities.features.without(Feature::Borrow);
        // Its part of the tensor goes on by itself and comes home: no copy does.
        capabilities.ops = capabilities.ops.without(OpKind::ReduceScatterInPlace);
        Self {
            inner,
            capabilities,
            calls: AtomicU32::new(0),
        }
    }

    fn moved(&self, op: &Collective) -> Result<Checked> {
        let info = self.inner.info();
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let ordinary = (call + info.rank).is_multiple_of(4);
        let op = op.with_tensors(info.rank, &mut |tensor, _| {
            if ordinary || tensor.is_complex() {
                return tensor.duplicate();
            }
            let mut own = self.inner.alloc(tensor.dtype(), tensor.count())?;
            own.bytes_mut().copy_from_slice(tensor.bytes());
            own.reshape(tensor.shape())
        })?;
        Ok(Checked::new(
            op,
            &info,
            self.inner.capabilities(),
            &SubmitOptions::default(),
        )?)
    }
}

impl Wrapper for InPlace {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        match self.moved(op.get()) {
            Ok(moved) => self.inner.submit(moved, options).map_err(|refused| {
                let error = refused.error;
                Box::new(Rejected {
                    error,
                    op: op.into_inner(),
                })
            }),
            Err(error) => Err(Box::new(Rejected {
                error,
                op: op.into_inner(),
            })),
        }
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let child = self.inner.split(color, key, deadline)?;
        Ok(child.map(|child| Box::new(Self::new(child)) as Box<dyn ProcessGroup>))
    }
}

fn main() -> ExitCode {
    let plan = Plan::new(
        Device::CPU,
        &[Mode::Threads, Mode::Processes],
        Arc::new(|_, mut options| {
            options.hints.insert("transport".into(), "shm".into());
            Ok(Box::new(InPlace::new(Box::new(GlooGroup::new(
                "conformance",
                options,
            )?))))
        }),
    );
    let limit = Limit {
        // Whose memory it is, that of this process or of another, is what is looked at.
        kills_only_again: false,
        ..Limit::of_a_wrapper()
    };
    Plan {
        large: true,
        limit,
        ..plan
    }
    .run()
}
