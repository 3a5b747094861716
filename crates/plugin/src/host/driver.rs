//! What a plugin's group gives the engine to work with: how an operation is handed to it, how it is aborted and closed.
//!
//! A plugin's group keeps its own order and deadlines and outlives configurations. The engine above it hands over what is submitted at once,
//! counts what callers carry out, and finds out what the plugin has not completed 2 s after its deadline.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use ftcore::engine::{self, Driver, Ended, Job, Label, Outcome, Place, Rules, Stage, Ticket, spawn};
use ftcore::{Collective, Device, DeviceKind, Error, ErrorKind, Result, Stream};

use super::device::{self, Devices};
use super::library::{Library, guarded};
use super::operation::{Outgoing, Pending, read_outcome};
use super::polling;
use crate::abi::{self, Growing, NONE, OK, WORK_POLLED};
use crate::{fault, text};

/// One configuration of a group at work.
pub(super) type Engine = engine::Engine<PluginDriver>;

/// A plugin ends its work at once when it is told to; the grace is for threads without a core. What it is told after that, to configure
/// another group say, is its own to refuse.
pub(super) const RULES: Rules = Rules {
    depth: usize::MAX,
    grace: Duration::from_millis(1500),
    gives_up: true,
};

/// The plugin's table. Closed when the last user is gone.
pub(super) struct Raw {
    pub(super) library: &'static Library,
    pub(super) table: abi::Group,
    /// The last field: its other end hears that the plugin's group was closed.
    pub(super) _closed: Sender<()>,
}

// SAFETY: the ABI says that a group's functions may be called from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Drop for Raw {
    fn drop(&mut self) {
        if ftcore::forked::is_child() {
            // The plugin's connections are the parent's.
            return;
        }
        if let Some(close) = self.table.close {
            // SAFETY: once: no other code has the table any more.
            guarded((), || unsafe { close(self.table.ctx) });
        }
    }
}

impl Raw {
    pub(super) fn abort(&self, reason: &str) {
        if let Some(abort) = self.table.abort.filter(|_| !ftcore::forked::is_child()) {
            // SAFETY: the plugin's own function and context.
            unsafe { abort(self.table.ctx, text::lend(reason)) }
        }
    }

    /// What the plugin says that the group failed with.
    pub(super) fn error(&self) -> Option<Error> {
        let f = self.table.error?;
        // SAFETY: the plugin's own function and context.
        self.library
            .call(|fault| unsafe { f(self.table.ctx, fault) })
            .err()
    }

    pub(super) fn devices(&self, kind: &DeviceKind) -> Option<Devices> {
        if *kind == DeviceKind::Cpu {
            return None;
        }
        device::find(self.library, kind)
    }

    /// The plugin's handle for a stream: null if there is none, and the inputs are ready.
    ///
    /// Errors: it is of another kind of device.
    pub(super) fn stream(&self, stream: Option<&dyn Stream>) -> Result<*mut c_void, Device> {
        let Some(stream) = stream.filter(|s| !s.device().is_cpu()) else {
            return Ok(std::ptr::null_mut());
        };
        let device = stream.device();
        let own = self.devices(&device.kind);
        own.and_then(|d| device::stream_handle(d, stream)).ok_or(device)
    }
}

/// A plugin's function that carries an operation out and returns when it has ended.
pub(super) type Execute =
    unsafe extern "C" fn(*mut c_void, *const abi::Operation, *mut abi::Outcome, *mut abi::Fault) -> i32;

/// What is submitted.
pub(super) struct Call {
    pub(super) op: Collective,
    pub(super) contribute: bool,
    /// After whose present end the inputs are ready: one of the plugin's.
    pub(super) stream: Option<Arc<dyn Stream>>,
}

impl Job for Call {
    fn into_op(self) -> Collective {
        self.op
    }
}

/// See the module.
pub(super) struct PluginDriver {
    raw: Arc<Raw>,
    place: Place,
    /// The group's device kind, if the plugin brings it: of that kind are the events that it records.
    devices: Option<Devices>,
}

impl PluginDriver {
    /// Over `raw`, a group on devices of `kind`.
    pub(super) fn start(raw: Arc<Raw>, place: Place, kind: &DeviceKind) -> Result<Arc<Engine>> {
        let devices = raw.devices(kind);
        let driver = Self { raw, place, devices };
        Engine::start("ox-plugin", place, RULES, driver)
    }

    /// An operation has failed: alone, unless the plugin says that its group has.
    pub(super) fn failed(&self, error: Error, tensors: Vec<ftcore::Tensor>) -> Outcome {
        match self.raw.error() {
            None => Outcome::Refused(error, tensors),
            // It was accepted before the plugin refused everything: it ends with the cause.
            Some(first) if error.kind() == ErrorKind::Poisoned => Outcome::Fatal(first, tensors),
            Some(_) => Outcome::Fatal(error, tensors),
        }
    }

    /// Hands `pending` to the plugin. Errors: it has refused it.
    fn submit(
        &self,
        pending: &Arc<Pending>,
        outgoing: &mut Outgoing,
        call: &Terms,
    ) -> Result<abi::WorkHandle> {
        let submit = self.raw.library.need(self.raw.table.submit, "submit")?;
        let operation = *outgoing.lend(pending, call.contribute, call.timeout_ms, call.stream)?;
        let (completion, handle_of_completion) = pending.completion()?;
        let mut handle = abi::WorkHandle::empty();
        // SAFETY: the plugin's own function and context; the structs live for the call, the memory in
        // `pending` until it is given back.
        let accepted = self.raw.library.call(|fault| unsafe {
            submit(
                self.raw.table.ctx,
                &raw const operation,
                &raw const completion,
                &raw mut handle,
                fault,
            )
        });
        accepted
            .map(|()| handle)
            .inspect_err(|_| Pending::forget_completion(handle_of_completion))
    }

    /// Has the plugin carry out `call` on this thread, where it has the function for that.
    pub(super) fn execute(&self, execute: Execute, call: Call, timeout_ms: i64) -> Outcome {
        let raw = &*self.raw;
        let mut outgoing = Outgoing::new(&call.op);
        let stream = raw.stream(call.stream.as_deref()).unwrap_or(std::ptr::null_mut());
        let pending = Arc::new(Pending::new(call.op, None, raw.library, self.place.world, None));
        let mut outcome = abi::Outcome::empty();
        outcome.source = NONE;
        let said = outgoing
            .lend(&pending, call.contribute, timeout_ms, stream)
            .and_then(|operation| {
                let mut said = Ok(outcome);
                raw.library
                    .call(|fault| {
                        // SAFETY: as in `submit`.
                        let status =
                            unsafe { execute(raw.table.ctx, &raw const *operation, &raw mut outcome, fault) };
                        if status == OK {
                            // While the fault of the call is there, which it may name.
                            // SAFETY: ours, filled in as the ABI says.
                            said = unsafe { read_outcome(&raw const outcome, &raw.library.name) };
                        }
                        status
                    })
                    .and(said)
            });
        pending.end_blocking(self, said)
    }
}

/// What crosses with an operation.
struct Terms {
    contribute: bool,
    timeout_ms: i64,
    stream: *mut c_void,
}

impl Driver for PluginDriver {
    type Job = Call;
    /// The plugin should have ended it itself, and has more to say. Shorter than what a caller waits for that ([`ftcore::Work::wait_done`]).
    const OVERTIME: Duration = Duration::from_secs(2);

    fn enqueue(&self, call: Call, ticket: Ticket<Self>) {
        let raw = &*self.raw;
        let terms = Terms {
            contribute: call.contribute,
            timeout_ms: fault::milliseconds(ticket.deadline()),
            stream: raw.stream(call.stream.as_deref()).unwrap_or(std::ptr::null_mut()),
        };
        let mut outgoing = Outgoing::new(&call.op);
        let (engine, number) = (ticket.engine().clone(), ticket.number());
        let pending = Arc::new(Pending::new(
            call.op,
            Some(ticket),
            raw.library,
            self.place.world,
            self.devices,
        ));
        let handle = match self.submit(&pending, &mut outgoing, &terms) {
            Ok(handle) => handle,
            Err(error) => return pending.refused(self, error),
        };
        if handle.close.is_some() || handle.poll.is_some() || handle.abort.is_some() {
            pending.set_handle(handle);
        }
        pending.accepted();
        if handle.flags & WORK_POLLED != 0
            && let Err(error) = polling::drive(move || pending.poll())
        {
            engine.fail_by(number, error);
        }
    }

    /// On a thread of its own: the plugin may be inside a call of ours, and the clock of all groups must not wait for it.
    fn interrupt(&self, failure: &Error, ended: Ended<Self>) {
        let (raw, reason) = (self.raw.clone(), self.place.reason(failure).to_string());
        let abort = move || {
            // What it found out itself it has told the others already.
            if raw.error().is_none() {
                raw.abort(&reason);
            }
            ended.clean();
        };
        if let Err(error) = spawn("ox-plugin-abort", abort) {
            tracing::warn!(%error, "a plugin's group is not aborted");
        }
    }

    fn abort_one(&self, number: u64, reason: &str) -> bool {
        Pending::find(self, number).is_some_and(|pending| pending.abort(reason))
    }

    /// The plugin's group goes on: it is configured again, shut down or closed.
    fn release(&self) -> Result<()> {
        Ok(())
    }

    fn waits_for(&self, _: &Label, stage: Stage) -> String {
        let plugin = self.raw.library.shown();
        match stage {
            Stage::Queued => format!("waiting until plugin {plugin} has taken earlier ones"),
            Stage::Finished => "done, but an earlier one is not".to_string(),
            Stage::Entering | Stage::Running => format!(
                "with plugin {plugin}, which should have ended it and has not. Its memory stays with the plugin; configure the group again, or \
                 run it isolated"
            ),
        }
    }
}
