//! The child process: opens the backend, carries out the parent's orders, reports.
//!
//! One thread reads orders and submits operations, in the order in which they came (`reading`); what blocks (configure,
//! split, shutdown) runs on threads of its own, so that an abort is always heard (`groups`). A watch thread reports failures
//! that no operation of this rank has seen. When the parent's socket closes, the process ends.

mod groups;
mod landed;
mod reading;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ftcore::{Device, Error, ErrorKind, GroupOptions, ProcessGroup, Registry, Result};
use rustix::io::fcntl_dupfd_cloexec;

use crate::channel::{Filled, Receiver};
use crate::crossing::PROBE;
use crate::options::ENV_CHILD;
use crate::store::proxy::Line;
use crate::wire::frames::{Carry, Either, Order, Report};
use crate::wire::odd;
use groups::{Groups, Reporter};

/// True in a process that was started as a child of an isolated group.
pub(crate) fn is_child() -> bool {
    let parent = rustix::process::getppid().map(|p| p.as_raw_nonzero().to_string());
    std::env::var(ENV_CHILD).is_ok_and(|asked| Some(asked) == parent)
}

/// Returns at once in an ordinary process. In one that an isolated group started it never returns: the process serves as
/// the group's child and exits with it.
///
/// Call it first thing in `main`, before arguments are read or anything is printed; in a test binary too. Whatever the
/// child needs beyond linked-in backends (plugins, logging) goes before it; plugins may also come from a
/// [`Finder`](ftcore::registry::Finder).
pub fn run_child_if_asked() {
    if !is_child() {
        return;
    }
    let code = match serve() {
        Ok(()) => 0,
        Err(error) => {
            // Captured by the parent, into its log and its errors.
            eprintln!("isolated child: {error}");
            1
        }
    };
    std::process::exit(code);
}

/// Takes the socket off standard input, so that nothing else in this process can read from it by mistake.
fn take_socket() -> Result<OwnedFd> {
    let io = |e: rustix::io::Errno| Error::io("take over the socket to the parent", e.into());
    let socket = fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).map_err(io)?;
    let null = std::fs::File::open("/dev/null").map_err(|e| Error::io("open /dev/null", e))?;
    rustix::stdio::dup2_stdin(&null).map_err(io)?;
    Ok(socket)
}

fn serve() -> Result<()> {
    let mut receiver = Receiver::new(Arc::new(take_socket()?), true);
    let (backend, device, options, carry, line, express) = hello(&mut receiver)?;
    let reporter = Arc::new(Reporter::new(receiver.shared(), express));
    let opened = open(&backend, &device, &options, &carry);
    let group = match opened {
        Ok(group) => {
            let capabilities = group.capabilities().clone();
            reporter.send(&Report::Ready { capabilities });
            group
        }
        Err(error) => {
            reporter.send(&Report::Refused { error });
            return Ok(());
        }
    };
    let crossing = match carry {
        Carry::Device(_) => ftcore::crossing(&device.kind).map(|c| (c, device)),
        Carry::Host | Carry::Land => None,
    };
    let groups = Groups::new(reporter, line, group, crossing)?;
    reading::follow(receiver, &groups)
}

type Hello = (String, Device, GroupOptions, Carry, Arc<Line>, OwnedFd);

/// The first frame, and the sockets for store calls and express reports.
fn hello(receiver: &mut Receiver) -> Result<Hello> {
    loop {
        if let Some(body) = receiver.next()? {
            let Either::Order(Order::Hello {
                backend,
                device,
                options,
                carry,
                ..
            }) = Order::decode(body)?
            else {
                return Err(odd("no greeting in the first frame"));
            };
            let line = Line::open(receiver.next_fd()?)?;
            return Ok((backend, device, options, carry, line, receiver.next_fd()?));
        }
        if receiver.fill(true)? == Filled::Closed {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the parent is gone before its first words",
            ));
        }
    }
}

fn open(
    backend: &str,
    device: &Device,
    options: &GroupOptions,
    carry: &Carry,
) -> Result<Box<dyn ProcessGroup>> {
    let found = Registry::global().get(backend, Some(&device.kind))?;
    let mut group = found.create(device, options)?;
    match carry {
        Carry::Host => {}
        Carry::Device(probe) => {
            let crossing = ftcore::crossing(&device.kind).ok_or_else(|| {
                Error::unsupported(format!(
                    "the child's program cannot open memory of {}",
                    device.kind
                ))
            })?;
            drop(crossing.open(device.index, probe, PROBE)?);
        }
        Carry::Land => group = Box::new(landed::Landed::new(group, device)?),
    }
    Ok(group)
}
