//! The real library, asked what needs no GPU. Runs where OXCCL_NCCL_PATH, the pip wheel or the loader has `libnccl.so.2`;
//! elsewhere every test is ignored with the reason.

use libtest_mimic::{Arguments, Failed, Trial};
use nccl_sys::{Library, OLDEST};

type Body = fn(&Library) -> Result<(), Failed>;

fn main() -> std::process::ExitCode {
    let arguments = Arguments::from_args();
    let tests: [(&str, Body); 4] = [
        ("tells_its_version", |l| {
            println!("NCCL {} at {}", l.version(), l.path().display());
            check(l.version() >= OLDEST, "an old version was accepted")
        }),
        ("has_words_for_its_codes", |l| {
            check(
                l.describe(0) == "no error",
                &format!("code 0 is '{}'", l.describe(0)),
            )?;
            check(
                l.describe(4).contains("invalid argument"),
                &format!("code 4 is '{}'", l.describe(4)),
            )
        }),
        ("a_newer_function_comes_with_its_version", |l| {
            let revokes = l.api().comm_revoke.is_some();
            check(
                revokes == (l.version() >= nccl_sys::Version::new(2, 28, 7)),
                &format!("ncclCommRevoke in {}: {revokes}", l.version()),
            )
        }),
        ("makes_ids_that_differ", |l| {
            let id = || {
                let mut id = nccl_sys::UniqueId([0; nccl_sys::UniqueId::BYTES]);
                // SAFETY: writes one id; needs a network interface, no GPU.
                let code = unsafe { (l.api().get_unique_id)(&raw mut id) };
                (code, id)
            };
            let (a, b) = (id(), id());
            check(a.0 == 0 && b.0 == 0, &format!("codes {} and {}", a.0, b.0))?;
            check(a.1 != b.1, "two ids are the same")
        }),
    ];
    let library = Library::open();
    let trials = tests
        .into_iter()
        .map(|(name, body)| {
            let outcome = match &library {
                Ok(l) => Ok(body(l)),
                Err(e) => Err(e.to_string()),
            };
            Trial::ignorable_test(name, move || match outcome {
                Ok(result) => result.map(|()| libtest_mimic::Completion::Completed),
                Err(reason) => Ok(libtest_mimic::Completion::ignored_with(reason)),
            })
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn check(ok: bool, text: &str) -> Result<(), Failed> {
    if ok { Ok(()) } else { Err(text.into()) }
}
