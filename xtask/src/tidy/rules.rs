//! Rules on code: where `unsafe` may stand, and that every thread has a name beginning with `ox-`.

use super::Finding;
use super::lexer::Source;

/// Checks one source file.
pub(super) fn check(source: &Source) -> Vec<Finding> {
    let mut findings = check_unsafe(source);
    findings.extend(check_threads(source));
    findings.extend(check_reasons(source));
    findings
}

/// A `SAFETY` comment says why the block is sound here. The number of an invariant stands for no reason.
fn check_reasons(source: &Source) -> Vec<Finding> {
    let mut is_safety = false;
    let mut findings = Vec::new();
    for (number, line) in (1..).zip(source.text.lines()) {
        let line = line.trim_start();
        is_safety = line.starts_with("//") && (is_safety || line.starts_with("// SAFETY"));
        if is_safety && line.contains("INV-") {
            let text = "a SAFETY comment says the reason, not the number of an invariant";
            findings.push(Finding::new(&source.path, number, "safety", text));
        }
    }
    findings
}

/// The places whose work needs `unsafe`. Everything else goes through them.
fn may_be_unsafe(path: &str) -> bool {
    // C interfaces written in Rust, and libraries that misbehave on purpose.
    let is_raw = |inside: &str| inside.starts_with("src/raw/") || inside == "src/raw.rs";
    if path.starts_with("fixtures/") || path.starts_with("plugins/hccl/fixtures/") {
        return true;
    }
    if let Some(inside) = path.strip_prefix("plugins/hccl/") {
        // The entry points that the plugin macro writes.
        return is_raw(inside) || inside == "src/export.rs";
    }
    // Devices of the kernel that only an ioctl makes.
    if path == "tests/src/bin/wan_link/raw.rs" {
        return true;
    }
    // What runs in a new process before its program starts.
    if path == "apps/launch/src/child.rs" {
        return true;
    }
    let Some(rest) = path.strip_prefix("crates/") else {
        return false;
    };
    let (krate, inside) = rest.split_once('/').unwrap_or((rest, ""));
    let (krate, inside) = match krate {
        "adapters" => ("adapters", inside.split_once('/').map_or("", |(_, i)| i)),
        other => (other, inside),
    };
    let is =
        |module: &str| inside == format!("src/{module}.rs") || inside.starts_with(&format!("src/{module}/"));
    let is_kernel = inside
        .split('/')
        .any(|part| matches!(part, "kernels" | "kernels.rs" | "simd" | "simd.rs"));
    is_kernel
        || krate.ends_with("-sys")
        || match krate {
            // dtype: the promise that a type is plain bytes, on which memory builds.
            // exit: `atexit`. ticks: the processor's counter. float_mode: its register.
            "ftcore" => {
                is("memory")
                    || is("dtype")
                    || is("exit")
                    || is("forked")
                    || is("flight_recorder/ticks")
                    || is("float_mode")
            }
            "plugin" | "vendor" => true,
            "backend-gloo" => is("transport/shm") || is("shm") || is("raw"),
            "backend-xccl" => {
                is_raw(inside) || inside.starts_with("src/sycl/raw") || inside == "tests/lifecycle/raw.rs"
            }
            "backend-nccl" => is_raw(inside) || inside.starts_with("src/cuda/raw"),
            "isolate" => is_raw(inside) || is("shm"),
            "adapters" => is("raw"),
            _ => false,
        }
}

fn check_unsafe(source: &Source) -> Vec<Finding> {
    if may_be_unsafe(&source.path) {
        return Vec::new();
    }
    let text = "`unsafe` has no place here: use the safe call of the room that owns it (the places are listed in \
                xtask/src/tidy/rules.rs)";
    let lines = source.words("unsafe").into_iter().map(|at| source.line_of(at));
    lines
        .map(|line| Finding::new(&source.path, line, "unsafe", text))
        .collect()
}

fn check_threads(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let code = source.code.as_str();
    let mut find = |at: usize, text: &str| {
        let line = source.line_of(at);
        if !source.is_test(line) {
            findings.push(Finding::new(&source.path, line, "thread", text));
        }
    };
    for (at, _) in code.match_indices("thread::spawn(") {
        find(
            at,
            "use `thread::Builder::new().name(\"ox-…\")`: a thread without a name cannot be found in a dump",
        );
    }
    let builders = [
        ("thread::Builder::new()", ".spawn", ".name("),
        ("Builder::new_multi_thread()", ".build", ".thread_name"),
    ];
    for (begin, end, name) in builders {
        for (at, _) in code.match_indices(begin) {
            let call = code.get(at..).unwrap_or_default();
            let length = call.find(end).unwrap_or(call.len());
            let call = call.get(..length).unwrap_or_default();
            if !call.contains(name) {
                find(at, &format!("give the thread a name: `{name}\"ox-…\")`"));
                continue;
            }
            let (first, last) = (source.line_of(at), source.line_of(at + length));
            let mut names = source
                .literals
                .iter()
                .filter(|(line, _)| (first..=last).contains(line))
                .peekable();
            // A name from a variable cannot be seen here.
            if names.peek().is_some() && !names.any(|(_, text)| text.starts_with("ox-")) {
                find(at, "the names of our threads begin with \"ox-\"");
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<(&'static str, usize)> {
        check(&Source::new(path, text))
            .into_iter()
            .map(|f| (f.rule, f.line))
            .collect()
    }

    #[test]
    fn unsafe_stands_only_in_its_rooms() {
        let text = "fn f() {\n    unsafe { g() }\n}\n";
        for path in [
            "crates/ftcore/src/memory.rs",
            "crates/nccl-sys/src/lib.rs",
            "crates/plugin/src/host.rs",
            "crates/backend-gloo/src/transport/shm.rs",
            "crates/backend-gloo/src/kernels/avx2.rs",
            "crates/adapters/candle/src/raw.rs",
            "apps/launch/src/child.rs",
            "crates/isolate/src/shm.rs",
            "crates/backend-xccl/src/raw/comm.rs",
            "fixtures/nccl-standin/src/nccl.rs",
            "plugins/hccl/src/raw/mod.rs",
        ] {
            assert!(lines(path, text).is_empty(), "{path}");
        }
        for path in [
            "crates/ftcore/src/work.rs",
            "crates/ftcore/src/memory_map.rs",
            "crates/backend-gloo/src/group.rs",
            "crates/adapters/candle/src/lib.rs",
            "crates/manager/tests/env.rs",
            "examples/src/memory.rs",
            "crates/backend-xccl/src/group.rs",
            "plugins/hccl/src/group.rs",
        ] {
            assert_eq!(lines(path, text), [("unsafe", 2)], "{path}");
        }
    }

    #[test]
    fn a_word_about_unsafe_is_not_unsafe() {
        let text = "//! x\n// unsafe\n#![deny(unsafe_code)]\nlet s = \"unsafe\";\n";
        assert!(lines("crates/ddp/src/lib.rs", text).is_empty());
    }

    #[test]
    fn threads_have_names_except_in_tests() {
        assert_eq!(
            lines(
                "crates/ddp/src/a.rs",
                "fn f() {\n    std::thread::spawn(|| ());\n}\n"
            ),
            [("thread", 2)]
        );
        let test = "#[cfg(test)]\nmod tests {\n    fn f() { std::thread::spawn(|| ()); }\n}\n";
        assert!(lines("crates/ddp/src/a.rs", test).is_empty());
    }

    #[test]
    fn a_safety_comment_gives_a_reason_and_no_number() {
        let path = "crates/plugin/src/a.rs";
        let text =
            "// INV-8 holds.\n// SAFETY: the buffer is ours,\n// as INV-8 asks.\nunsafe { g() }\n// INV-8\n";
        assert_eq!(lines(path, text), [("safety", 3)]);
        assert!(lines(path, "// SAFETY: the buffer is ours.\nunsafe { g() }\n").is_empty());
    }

    #[test]
    fn builders_give_a_name_with_our_prefix() {
        let unnamed = "thread::Builder::new().spawn(f)";
        let foreign = "thread::Builder::new().name(\"worker\".into()).spawn(f)";
        let good = "thread::Builder::new()\n    .name(format!(\"ox-io-{n}\"))\n    .spawn(f)";
        let given = "thread::Builder::new().name(name).spawn(f)";
        assert_eq!(lines("crates/ddp/src/a.rs", unnamed), [("thread", 1)]);
        assert_eq!(lines("crates/ddp/src/a.rs", foreign), [("thread", 1)]);
        assert!(lines("crates/ddp/src/a.rs", good).is_empty());
        assert!(lines("crates/ddp/src/a.rs", given).is_empty());
        assert_eq!(
            lines(
                "crates/oxccl/src/a.rs",
                "Builder::new_multi_thread().enable_all().build()"
            )
            .len(),
            1
        );
    }
}
