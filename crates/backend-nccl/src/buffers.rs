//! Memory that the library makes and a group's communicator is told of, so that NCCL reaches it without buffers of its own. Asked for
//! by the hint `buffers`; [`crate::NcclGroup::alloc`] gives the tensors.
//!
//! A tensor's owner is a [`Lease`]. While a communicator knows the memory its engine holds it, too (`Held`), so that it is never freed
//! under a registration: dropping the tensor ends the registration and then frees the memory, both on a thread, because the library waits
//! for the device; a communicator that hangs in its abort keeps it for ever, and what one knows whose abort fails is leaked and counted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ftcore::{DType, Error, ErrorKind, Event, Result, Tensor, deadline_in};

use crate::bounded::bounded;
use crate::cuda::gpu::Gpu;
use crate::cuda::lost;
use crate::cuda::raw::{self, Span};
use crate::engine::Engine;
use crate::raw::{Comm, Nccl, Registration};
use crate::threads::errand;

/// What the hint `buffers` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Ordinary device memory.
    Plain,
    /// Each rank's own: `ncclCommRegister`.
    Registered,
    /// All ranks' together: `ncclCommWindowRegister`.
    Window,
}

/// How long a copy to or from a buffer may take after its tensor was dropped.
const LAST_COPY: Duration = Duration::from_secs(60);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block of `ncclMemAlloc`.
pub(crate) struct Memory {
    gpu: Arc<Gpu>,
    nccl: &'static Nccl,
    span: Span,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (gpu, nccl, span) = (self.gpu.clone(), self.nccl, self.span);
        errand("ox-nccl-free", move || {
            let freed = gpu.enter().and_then(|_inside| {
                if let Some(copy) = gpu.last_use(span.start()) {
                    copy.synchronize(deadline_in(LAST_COPY))?;
                }
                nccl.mem_free(span)
            });
            if let Err(error) = freed {
                lost::on_device(&gpu, span, "memory of NCCL's own", error);
            }
        });
    }
}

/// What one communicator knows.
#[derive(Default)]
pub(crate) struct Held(Mutex<Vec<(Arc<Memory>, Registration)>>);

impl Held {
    /// `comm` knows `memory` by `registration`.
    fn add(&self, comm: &Comm, memory: Arc<Memory>, registration: Registration) {
        lock(&self.0).push((memory, registration));
        // Ended meanwhile, and cleared perhaps before this was there.
        if comm.is_freed() {
            self.clear(true);
        }
    }

    fn take(&self, memory: &Arc<Memory>) -> Option<Registration> {
        let mut list = lock(&self.0);
        let at = list.iter().position(|(m, _)| Arc::ptr_eq(m, memory))?;
        Some(list.swap_remove(at).1)
    }

    /// Ends every registration of `engine`, whose communicator is idle and about to be freed.
    pub(crate) fn end(&self, engine: &Engine) {
        // Not under the lock, which what stays needs.
        let held = std::mem::take(&mut *lock(&self.0));
        for (memory, registration) in held {
            if let Err(error) = engine.comm.deregister(&registration) {
                tracing::warn!(bytes = memory.span.bytes(), %error, "a buffer stays registered with its communicator");
                // Not before the communicator is gone.
                self.add(&engine.comm, memory, registration);
            }
        }
    }

    /// The communicator was ended, and all its registrations with it. If that failed, the memory is kept for ever, and counted.
    pub(crate) fn clear(&self, communicator_is_freed: bool) {
        let held = std::mem::take(&mut *lock(&self.0));
        if communicator_is_freed {
            return;
        }
        for (memory, _) in held {
            let why = "the communicator that knows it could not be ended";
            lost::on_device(&memory.gpu, memory.span, "registered memory", why);
            std::mem::forget(memory);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // What came back after `clear`, because a registration could not be ended: nothing is left if the communicator was freed.
        self.clear(false);
    }
}

/// The buffers of a group over all its configurations.
#[derive(Default)]
pub(crate) struct Buffers {
    live: Mutex<Vec<Weak<Memory>>>,
    engine: Mutex<Weak<Engine>>,
}

/// A tensor's owner.
struct Lease {
    memory: Arc<Memory>,
    buffers: Arc<Buffers>,
    kind: Kind,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.kind == Kind::Window {
            // Ending it is not one rank's affair: it stays until the communicator goes.
            return;
        }
        let Some(engine) = lock(&self.buffers.engine).upgrade() else {
            return;
        };
        let memory = self.memory.clone();
        errand("ox-nccl-free", move || {
            let Some(registration) = engine.held.take(&memory) else {
                return;
            };
            let ended = engine
                .gpu
                .enter()
                .and_then(|_inside| engine.comm.deregister(&registration));
            if let Err(error) = ended {
                tracing::debug!(%error, "a buffer stays registered until its communicator is gone");
                engine.held.add(&engine.comm, memory, registration);
            }
        });
    }
}

impl Buffers {
    /// A new communicator: tells it of the buffers that are there. Windows are not remade, because the ranks may have others.
    pub(crate) fn moved_to(&self, engine: &Arc<Engine>, kind: Kind) -> Result<()> {
        *lock(&self.engine) = Arc::downgrade(engine);
        if kind != Kind::Registered {
            return Ok(());
        }
        let live: Vec<Arc<Memory>> = {
            let mut live = lock(&self.live);
            live.retain(|memory| memory.strong_count() > 0);
            live.iter().filter_map(Weak::upgrade).collect()
        };
        for memory in live {
            let registration = engine.comm.register(memory.span)?;
            engine.held.add(&engine.comm, memory, registration);
        }
        Ok(())
    }

    /// A tensor as `kind` says, with undefined contents. `engine`: the present configuration, which windows need.
    pub(crate) fn alloc(
        self: &Arc<Self>,
        gpu: &Arc<Gpu>,
        nccl: &'static Nccl,
        kind: Kind,
        engine: Option<Arc<Engine>>,
        (dtype, shape): (DType, &[usize]),
        deadline: Instant,
    ) -> Result<Tensor> {
        let bytes = shape.iter().try_fold(dtype.size(), |a, &d| a.checked_mul(d));
        let Some(bytes) = bytes.filter(|b| isize::try_from(*b).is_ok()) else {
            let text = format!("shape {shape:?} has more elements than fit in memory");
            return Err(Error::invalid(text));
        };
        if kind == Kind::Plain || bytes == 0 {
            return crate::cuda::memory::tensor(gpu, dtype, shape);
        }
        let failed = engine.clone();
        let stop = move || failed.as_ref().and_then(|e| e.failure());
        let late = || Error::timeout("NCCL did not return from ncclMemAlloc by the deadline");
        let device = gpu.clone();
        let make = move || -> Result<Memory> {
            let _inside = device.enter()?;
            let span = nccl.mem_alloc(bytes)?;
            Ok(Memory {
                gpu: device,
                nccl,
                span,
            })
        };
        let memory = Arc::new(bounded("ox-nccl-alloc", deadline, &stop, &late, make, drop)??);
        lock(&self.live).push(Arc::downgrade(&memory));
        match (kind, engine) {
            (Kind::Window, Some(engine)) => window(&engine, &memory, deadline)?,
            (Kind::Window, None) => {
                let text = "a window is made by all ranks of a configured group";
                return Err(Error::new(ErrorKind::InvalidState, text));
            }
            (_, Some(engine)) => {
                let registration = engine.comm.register(memory.span)?;
                engine.held.add(&engine.comm, memory.clone(), registration);
            }
            // The next configuration does it.
            (_, None) => {}
        }
        let lease = Lease {
            memory: memory.clone(),
            buffers: self.clone(),
            kind,
        };
        raw::tensor(memory.span, dtype, shape, gpu.device(), Box::new(lease))
    }
}

/// A collective call: what goes wrong on the way fails the group, as a split does.
fn window(engine: &Arc<Engine>, memory: &Arc<Memory>, deadline: Instant) -> Result<()> {
    let stop = || engine.failure();
    let late =
        || Error::timeout("NCCL did not make the window by the deadline: all ranks must allocate alike");
    let (this, kept) = (engine.clone(), memory.clone());
    let register = move || -> Result<()> {
        let _inside = this.gpu.enter()?;
        let reason = || this.failure();
        this.comm.settle(deadline, &reason)?;
        // Held from here on, also if nobody waits for the answer any more.
        match this.comm.window(kept.span, deadline, &reason) {
            Ok(registration) => {
                this.held.add(&this.comm, kept, registration);
                Ok(())
            }
            Err(error) => {
                this.held.add(&this.comm, kept, Registration::unknown());
                Err(error)
            }
        }
    };
    engine.jointly("alloc", || {
        let made = bounded("ox-nccl-window", deadline, &stop, &late, register, drop);
        made.and_then(|made| made)
            .map_err(|error| match (error.kind(), engine.failure()) {
                (ErrorKind::Timeout, None) => late(),
                _ => error,
            })
    })
}
