//! Groups of a plugin that is made of functions of this file: what becomes of its events, its outcomes and the memory that it holds.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Collective, Configuration, DType, DTypeSet, Device, DeviceKind, Epoch, Error, ErrorKind,
    Feature, FeatureSet, InMemoryStore, OpKind, OpSet, ProcessGroup, ProcessGroupExt, ReduceOp,
    SubmitOptions, Tensor, deadline_in,
};

use super::driver::Execute;
use super::group::PluginGroup;
use super::library::Library;
use crate::abi::{self, Fault, Growing, NONE, OK};
use crate::{fault, offer, text};

const LONG: Duration = Duration::from_secs(20);

/// What the plugin knows of its one group.
struct Plugin {
    /// The device kind on which it works.
    kind: &'static str,
    /// Events that it was given back.
    events: AtomicUsize,
    /// A buffer that it has retained.
    held: Mutex<Option<abi::Buffer>>,
}

// SAFETY: a buffer's functions may be called from any thread.
unsafe impl Sync for Plugin {}

/// # Safety
/// `ctx` is the stand-in's.
unsafe fn plugin<'a>(ctx: *mut c_void) -> &'a Plugin {
    // SAFETY: by the contract; it is never freed.
    unsafe { &*ctx.cast::<Plugin>() }
}

unsafe extern "C" fn info(
    ctx: *mut c_void,
    reply_ctx: *mut c_void,
    reply: Option<unsafe extern "C" fn(*mut c_void, *const abi::Info)>,
) {
    let mut i = abi::Info::empty();
    i.backend = text::lend("stand-in");
    i.name = i.backend;
    i.world_size = 1;
    i.epoch = 1;
    // SAFETY: the host's own function, and the stand-in's ctx.
    unsafe {
        i.device.kind = text::lend(plugin(ctx).kind);
        reply.unwrap()(reply_ctx, &raw const i);
    }
}

unsafe extern "C" fn capabilities(_: *mut c_void, reply_ctx: *mut c_void, reply: offer::Reply) {
    let all = Capabilities {
        ops: OpSet::of(&[OpKind::AllReduce, OpKind::Barrier]),
        moves: DTypeSet::of(&DType::ALL),
        reduces: [DTypeSet::of(&DType::ALL); ReduceOp::COUNT],
        features: FeatureSet::of(&[Feature::Borrow]),
        options: Vec::new(),
        devices: vec!["cpu".into()],
        notes: Vec::new(),
    };
    // SAFETY: both are the host's.
    unsafe { offer::tell(&all, reply_ctx, reply) };
}

unsafe extern "C" fn configure(_: *mut c_void, _: *const abi::Configuration, _: *mut Fault) -> i32 {
    OK
}

/// Records an event for what has no buffers, and ends it; refuses anything else, and holds on to its memory all the same.
unsafe extern "C" fn submit(
    ctx: *mut c_void,
    operation: *const abi::Operation,
    completion: *const abi::Completion,
    _: *mut abi::WorkHandle,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host keeps to the ABI.
    unsafe {
        let (operation, completion) = (&*operation, &*completion);
        if operation.buffer_count == 0 {
            completion.recorded.unwrap()(completion.ctx, NonNull::dangling().as_ptr());
            let mut outcome = abi::Outcome::empty();
            outcome.source = NONE;
            completion.complete.unwrap()(completion.ctx, &raw const outcome);
            return OK;
        }
        let buffer = *operation.buffers;
        buffer.retain.unwrap()(buffer.owner);
        *plugin(ctx).held.lock().unwrap() = Some(buffer);
        fault::answer(Err(Error::new(ErrorKind::Backend, "on second thoughts")), fault)
    }
}

/// Says in the outcome alone that it has failed.
unsafe extern "C" fn execute(
    _: *mut c_void,
    _: *const abi::Operation,
    outcome: *mut abi::Outcome,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the host keeps to the ABI.
    unsafe {
        (*outcome).status = fault::answer(Err(Error::new(ErrorKind::Backend, "no way")), fault);
        (*outcome).fault = fault;
    }
    OK
}

unsafe extern "C" fn abort(_: *mut c_void, _: abi::Str) {}

unsafe extern "C" fn shutdown(_: *mut c_void, _: i64, _: *mut Fault) -> i32 {
    OK
}

unsafe extern "C" fn close(_: *mut c_void) {}

unsafe extern "C" fn device(ctx: *mut c_void, _: u32, table: *mut abi::DeviceTable, _: *mut Fault) -> i32 {
    unsafe extern "C" fn release(ctx: *mut c_void, _: *mut c_void) {
        // SAFETY: the stand-in's ctx.
        unsafe { plugin(ctx) }.events.fetch_add(1, Ordering::SeqCst);
    }
    // SAFETY: the host's own struct.
    unsafe {
        (*table).ctx = ctx;
        (*table).event_release = Some(release);
    }
    OK
}

/// A configured group on devices of `kind`, and what its plugin knows.
fn group(kind: &'static str) -> (PluginGroup, &'static Plugin) {
    group_with(kind, Some(execute))
}

fn group_with(kind: &'static str, execute: Option<Execute>) -> (PluginGroup, &'static Plugin) {
    let plugin: &Plugin = Box::leak(Box::new(Plugin {
        kind,
        events: AtomicUsize::new(0),
        held: Mutex::default(),
    }));
    let ctx = std::ptr::from_ref(plugin).cast_mut().cast();
    let mut table = abi::Plugin::empty();
    table.ctx = ctx;
    table.device = Some(device);
    let kinds = match Device::new(kind.parse().unwrap(), 0) {
        device if device.is_cpu() => Vec::new(),
        device => vec![device.kind],
    };
    let library = Library::stand_in("stand-in", kinds, table);
    let mut table = abi::Group::empty();
    table.ctx = ctx;
    table.info = Some(info);
    table.capabilities = Some(capabilities);
    table.configure = Some(configure);
    table.submit = Some(submit);
    table.execute = execute;
    table.abort = Some(abort);
    table.shutdown = Some(shutdown);
    table.close = Some(close);
    let group = PluginGroup::adopt(library, &table, "stand-in", LONG).unwrap();
    group
        .configure(Configuration {
            store: Arc::new(InMemoryStore::new()),
            prefix: "p".into(),
            name: "n".into(),
            epoch: Epoch(1),
            rank: 0,
            world_size: 1,
            deadline: deadline_in(LONG),
            cancel: Default::default(),
        })
        .unwrap();
    (group, plugin)
}

#[test]
fn an_event_that_is_recorded_for_an_operation_without_memory_is_given_back() {
    let (group, plugin) = group("toy");
    assert_eq!(group.info().device.kind, DeviceKind::Named("toy".into()));
    for round in 1..=3 {
        let work = group.run(Collective::Barrier, SubmitOptions::default()).unwrap();
        work.wait(deadline_in(LONG)).unwrap();
        drop(work);
        let until = Instant::now() + LONG;
        while plugin.events.load(Ordering::SeqCst) < round {
            assert!(Instant::now() < until, "the event of operation {round} is lost");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_blocking_operation_that_failed_by_its_outcome_alone_has_failed() {
    let (group, _) = group("cpu");
    let op = Collective::AllReduce {
        tensors: vec![Tensor::from_vec(vec![1.0f32])],
        op: ReduceOp::Sum,
    };
    let failed = group.run_blocking(op, SubmitOptions::default()).unwrap_err();
    assert_eq!(
        (failed.error.kind(), failed.error.message()),
        (ErrorKind::Backend, "no way")
    );
    assert_eq!(failed.tensors.len(), 1);
}

/// A call of such a group may return while its memory is still the plugin's.
#[test]
fn a_group_without_execute_does_not_borrow_whatever_it_says() {
    let (group, _) = group("cpu");
    assert!(group.capabilities().has(Feature::Borrow));
    let (group, plugin) = group_with("cpu", None);
    assert!(!group.capabilities().has(Feature::Borrow));
    // Ends this process if it was lent.
    let error = group.all_reduce_slice(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    let buffer = plugin.held.lock().unwrap().take().unwrap();
    // SAFETY: the host's own function, once.
    unsafe { buffer.release.unwrap()(buffer.owner) };
}

#[test]
fn memory_that_a_plugin_retains_while_it_refuses_is_kept_until_it_is_given_back() {
    let (group, plugin) = group("cpu");
    let memory = Arc::new([0u32; 4]);
    let at = NonNull::new(memory.as_ptr().cast_mut().cast::<u8>()).unwrap();
    // SAFETY: four numbers, which the owner keeps and nothing here reads.
    let tensor =
        unsafe { Tensor::from_raw(at, DType::I32, &[4], None, Device::CPU, Box::new(memory.clone())) };
    let work = group.all_reduce(tensor.unwrap(), ReduceOp::Sum).unwrap();
    let error = work.wait(deadline_in(LONG)).unwrap_err();
    assert_eq!(
        (error.kind(), error.message()),
        (ErrorKind::Backend, "on second thoughts")
    );
    assert!(work.recover().is_empty(), "the plugin may still write there");
    drop(work);
    assert_eq!(Arc::strong_count(&memory), 2, "it was freed");
    let buffer = plugin.held.lock().unwrap().take().unwrap();
    // SAFETY: the host's own function, once.
    unsafe { buffer.release.unwrap()(buffer.owner) };
    assert_eq!(Arc::strong_count(&memory), 1, "it is kept for ever");
}
