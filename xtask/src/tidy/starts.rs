//! The types and traits from which people start have an example in their documentation; `cargo test --doc` compiles it.

use super::Finding;
use super::lexer::Source;

/// The folder of the crate, and the names there.
const STARTS: &[(&str, &[&str])] = &[
    (
        "crates/ftcore/",
        &[
            "BackendFactory",
            "Driver",
            "Error",
            "FileStore",
            "GroupOptions",
            "ProcessGroup",
            "ProcessGroupExt",
            "Registry",
            "Store",
            "SubmitOptions",
            "TcpStore",
            "Tensor",
            "Work",
        ],
    ),
    ("crates/backend-gloo/", &["GlooGroup"]),
    ("crates/isolate/", &["IsolatedGroup"]),
    ("crates/quant/", &["QuantizedGroup"]),
    (
        "crates/world/",
        &[
            "DeviceMesh",
            "GroupSpec",
            "LayoutSpec",
            "Place",
            "RankOrder",
            "World",
        ],
    ),
    ("crates/coordination/", &["LighthouseConfig", "LighthouseServer"]),
    ("crates/manager/", &["Manager", "ManagerConfig"]),
    ("crates/replica/", &["Replica", "State", "StateDict"]),
    ("crates/ddp/", &["Ddp", "DdpConfig", "Sampler"]),
    (
        "crates/diloco/",
        &["Diloco", "DilocoConfig", "Parameters", "SliceParameters"],
    ),
    ("crates/adapters/candle/", &["ParamSet"]),
    ("crates/oxccl/", &["ReplicaEnv"]),
];

/// Checks all sources together: each name is declared in its crate, with an example.
pub(super) fn check(sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (folder, names) in STARTS {
        for name in *names {
            let text = match declared(sources, folder, name) {
                None => format!("there is no `pub struct` or `pub trait` {name}: correct STARTS"),
                Some((path, line, false)) => {
                    let text = format!("{name} has no example in its documentation");
                    findings.push(Finding::new(path, line, "example", text));
                    continue;
                }
                Some(_) => continue,
            };
            findings.push(Finding::new(folder, 0, "example", text));
        }
    }
    findings
}

/// Where `name` is declared, and whether its documentation has an example. Of several declarations that with one.
fn declared<'a>(sources: &'a [Source], folder: &str, name: &str) -> Option<(&'a str, usize, bool)> {
    let mut found = None;
    for source in sources.iter().filter(|s| s.path.starts_with(folder)) {
        let mut has_example = false;
        for (number, line) in (1..).zip(source.text.lines()) {
            if let Some(documentation) = line.strip_prefix("///") {
                has_example |= documentation.trim_start().starts_with("```");
                continue;
            }
            let rest = line
                .strip_prefix("pub struct ")
                .or_else(|| line.strip_prefix("pub trait "));
            let is_it = rest
                .and_then(|rest| rest.strip_prefix(name))
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'));
            if is_it {
                found = Some((source.path.as_str(), number, has_example));
                if has_example {
                    return found;
                }
            }
            // Attributes stand between the documentation and what it is of.
            has_example &= line.starts_with("#[") || line.starts_with([' ', ')', ']']);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_without_an_example_is_found_with_its_line() {
        let text = "/// What it is.\n///\n/// ```\n/// a();\n/// ```\n#[derive(\n    Debug\n)]\npub struct Work(u8);\n\n\
                    /// None.\npub struct Worker;\n";
        let sources = [Source::new("crates/ftcore/src/a.rs", text)];
        let of = |name: &str| declared(&sources, "crates/ftcore/", name);
        assert_eq!(of("Work"), Some(("crates/ftcore/src/a.rs", 9, true)));
        assert_eq!(of("Worker"), Some(("crates/ftcore/src/a.rs", 12, false)));
        assert_eq!(of("Wor"), None);
        assert_eq!(declared(&sources, "crates/quant/", "Work"), None);
    }
}
