//! Calls that the backend never makes, straight to the library.

use oneccl_sys::{DataType, Flavour, Library, RedOp, ResultCode, UniqueId};

use super::{Outcome, Rank, ensure};

/// What oneCCL says of calls that it refuses, on a communicator of one rank, which goes on.
pub(super) fn words_of_calls(_: &Rank) -> Outcome {
    let library = Library::open(Flavour::Host)?;
    let (f, none) = (&library.functions, std::ptr::null_mut());
    let (mut id, mut comm) = (UniqueId::zeroed(), std::ptr::null_mut());
    let mut data = [1f32, 2.0];
    let at: *mut std::ffi::c_void = data.as_mut_ptr().cast();
    // SAFETY: the out-parameter is a live id.
    let code = unsafe { (f.get_unique_id)(&raw mut id) };
    ensure(code == ResultCode::SUCCESS, || format!("{code:?}"))?;
    // SAFETY: a live out-parameter, and the id from above.
    let code = unsafe { (f.comm_init_rank)(&raw mut comm, 1, id, 0) };
    ensure(code == ResultCode::SUCCESS, || format!("{code:?}"))?;
    let sum = |dtype, op| {
        // SAFETY: two elements in place on a live communicator; the library refuses types and reductions that it does not know.
        unsafe { (f.all_reduce)(at, at, 2, dtype, op, comm, none) }
    };
    let broadcast = |root| {
        // SAFETY: as above; the root is checked by the library.
        unsafe { (f.broadcast)(at.cast_const(), at, 2, DataType::F32, root, comm, none) }
    };
    type Call<'a> = &'a dyn Fn() -> ResultCode;
    let calls: [(Call<'_>, &str); 3] = [
        (
            &|| sum(DataType::F32, RedOp::AVG),
            "Unsupported onecclRedOp_t value",
        ),
        (
            &|| sum(DataType(99), RedOp::SUM),
            "Unsupported onecclDataType_t value",
        ),
        (&|| broadcast(9), "unexpected root 9, comm size 1"),
    ];
    for (call, words) in calls {
        let code = call();
        // SAFETY: a live communicator.
        let text = unsafe { library.describe(code, comm) };
        ensure(
            code == ResultCode::PLUGIN_EXCEPTION && text.contains(words),
            || format!("{code:?}: '{text}', not '{words}'"),
        )?;
    }
    ensure(sum(DataType::F32, RedOp::SUM) == ResultCode::SUCCESS, || {
        "it does not go on".into()
    })?;
    // SAFETY: no thread is in a call.
    let code = unsafe { (f.comm_destroy)(comm) };
    ensure(code == ResultCode::SUCCESS && data == [1.0, 2.0], || {
        format!("{code:?}, {data:?}")
    })
}
