//! The training state on its way between Python and a replica, and the calls in which it is asked for.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use oxccl::checkpoint::{StateDict, StateTensor};
use oxccl::core::{Error, ErrorKind, Result};
use oxccl::manager::State;
use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::errors::{self, Raise};
use crate::interrupt::SLICE;
use crate::lend::{Access, one};
use crate::process::{Crossing, detached};
use crate::raw::holder::{drop_attached, give_back_waiting};

/// Python's part of a state: tensors under this prefix, and how they lie in the state.
const PREFIX: &str = "python/";
const TREE: &str = "python.tree";

/// Tensors by name, and the text that says where they belong.
struct Saved {
    tensors: Vec<(String, StateTensor)>,
    tree: String,
}

/// What the thread of a call says to the thread that called.
enum Said<T> {
    Save(SyncSender<Result<Saved>>),
    Load(StateDict, SyncSender<Result<()>>),
    Done(Result<T>),
}

/// The state as the call's thread sees it.
struct Asking<T>(Sender<Said<T>>);

impl<T> Asking<T> {
    /// Asks, and waits for the answer: for as long as Python's code takes, or until the caller no longer listens.
    fn ask<R>(&self, question: impl FnOnce(SyncSender<Result<R>>) -> Said<T>) -> Result<R> {
        let gone = || Error::new(ErrorKind::Aborted, "the call was interrupted at the keyboard");
        let (give, take) = sync_channel(1);
        self.0.send(question(give)).map_err(|_| gone())?;
        take.recv().map_err(|_| gone())?
    }
}

impl<T> State for Asking<T> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        let saved = self.ask(Said::Save)?;
        for (name, tensor) in saved.tensors {
            out.insert(format!("{PREFIX}{name}"), tensor)?;
        }
        out.set_metadata(TREE, saved.tree);
        Ok(())
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.ask(|reply| Said::Load(from.clone(), reply))
    }
}

/// Runs `call` on a thread of its own. What it asks of the state, `states` answers here: `save()` and `load(tensors, tree)`. At `KeyboardInterrupt`
/// `interrupt` is called, and what the call still gives is dropped.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    states: &Bound<'_, PyAny>,
    interrupt: impl FnOnce(),
    call: impl FnOnce(&mut dyn State) -> Result<T> + Send + 'static,
) -> PyResult<T> {
    give_back_waiting(py);
    let (say, hear) = channel();
    let started = thread::Builder::new()
        .name("ox-py-replica".into())
        .spawn(move || {
            let done = call(&mut Asking(say.clone()));
            // The receiver may be gone.
            drop(say.send(Said::Done(done)));
        });
    started.map_err(|e| errors::raise(py, &Error::io("cannot start a thread", e)))?;
    let hear = Mutex::new(hear);
    let mut failure = None;
    loop {
        let answered = match next(py, &hear) {
            Some(Said::Save(reply)) => answer(py, reply, save(states), &mut failure),
            Some(Said::Load(from, reply)) => answer(py, reply, load(states, &from), &mut failure),
            Some(Said::Done(Ok(done))) => return Ok(done),
            Some(Said::Done(Err(error))) => {
                let raised = errors::raise(py, &error);
                raised.set_cause(py, failure);
                return Err(raised);
            }
            None => Ok(()),
        };
        if let Err(interrupted) = answered.and_then(|()| py.check_signals()) {
            interrupt();
            return Err(interrupted);
        }
    }
}

/// `None` if nothing was said for a while.
fn next<T: Send>(py: Python<'_>, hear: &Mutex<Receiver<Said<T>>>) -> Option<Said<T>> {
    let wait = || {
        let hear = hear.lock().unwrap_or_else(PoisonError::into_inner);
        hear.recv_timeout(SLICE)
    };
    match detached(py, wait) {
        Ok(said) => Some(said),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(Said::Done(Err(Error::new(
            ErrorKind::Internal,
            "the call's thread panicked",
        )))),
    }
}

/// Hands over what Python's code gave. Its exception goes to the call as an error, and is kept; one that is not for programs to handle ends the call.
fn answer<R>(
    py: Python<'_>,
    reply: SyncSender<Result<R>>,
    given: PyResult<R>,
    failure: &mut Option<PyErr>,
) -> PyResult<()> {
    let given = match given {
        Ok(given) => Ok(given),
        Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
        Err(error) => {
            let text = format!("the training state: {}", error.value(py));
            // The state is of no step: no quorum is asked for with it.
            let kind = error.value(py).getattr(intern!(py, "kind"));
            let kind = match kind.is_ok_and(|kind| kind.eq("InvalidState").unwrap_or(false)) {
                true => ErrorKind::InvalidState,
                false => ErrorKind::InvalidArgument,
            };
            failure.get_or_insert(error);
            Err(Error::new(kind, text))
        }
    };
    // The call may have ended meanwhile.
    drop(reply.send(given));
    Ok(())
}

fn save(states: &Bound<'_, PyAny>) -> PyResult<Saved> {
    let py = states.py();
    let _crossing = Crossing::begin().or_raise(py)?;
    type Given<'py> = (Vec<(String, Vec<usize>, Bound<'py, PyAny>)>, String);
    let (given, tree): Given<'_> = states.call_method0(intern!(py, "save"))?.extract()?;
    let copy = |(name, shape, memory): (String, Vec<usize>, Bound<'_, PyAny>)| {
        let lent = one(&memory, &name, Access::Reads).map_err(|refused| refused.raise(py, "save", 0))?;
        let tensor = StateTensor::new(lent.dtype(), shape, lent.bytes().to_vec()).or_raise(py);
        drop_attached(py, lent);
        Ok((name, tensor?))
    };
    let tensors = given.into_iter().map(copy).collect::<PyResult<_>>()?;
    Ok(Saved { tensors, tree })
}

fn load(states: &Bound<'_, PyAny>, from: &StateDict) -> PyResult<()> {
    let py = states.py();
    let _crossing = Crossing::begin().or_raise(py)?;
    let tree = from.metadata().get(TREE).ok_or_else(|| {
        let text =
            "the state that came is not one of a Python replica: all replicas of a job run the same program";
        errors::raise(py, &Error::invalid(text))
    })?;
    let own = from
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix(PREFIX)?, tensor)));
    let tensors: Vec<_> = own
        .map(|(name, t)| {
            let bytes = PyByteArray::new(py, &t.data);
            (name.to_owned(), t.dtype.name(), t.shape.clone(), bytes)
        })
        .collect();
    states
        .call_method1(intern!(py, "load"), (tensors, tree))
        .map(drop)
}
