//! Makes the C header out of the Rust structs, and checks that what is checked in is what they say.
#![allow(
    clippy::panic,
    reason = "a struct that the generator cannot read is a failure of the test"
)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ftcore::{DType, ErrorKind, Feature, OpKind, ReduceOp};
use oxccl_plugin::abi::{self, StructLayout, meaning};

use crate::build;

/// The folder of the header.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Compares the header with what the structs say; `OXCCL_BLESS=1` writes it.
pub(crate) fn is_what_the_structs_say() -> Result<(), String> {
    let (path, wanted) = (folder().join("oxccl_plugin.h"), generate());
    if std::env::var("OXCCL_BLESS").is_ok_and(|v| v == "1") {
        std::fs::write(&path, &wanted).map_err(|e| e.to_string())?;
    }
    let found = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    if let Some((n, (a, b))) = (1..)
        .zip(found.lines().zip(wanted.lines()))
        .find(|(_, (a, b))| a != b)
    {
        return Err(format!(
            "{}:{n} is not what the structs say (OXCCL_BLESS=1 writes it)\n  file:    {a}\n  structs: {b}",
            path.display()
        ));
    }
    if found != wanted {
        return Err(format!("{} has another length than it should", path.display()));
    }
    Ok(())
}

/// Compiles the header with all layout assertions.
pub(crate) fn compiles_with_the_same_layout() -> Result<(), String> {
    let text = "#define OXCCL_PLUGIN_CHECK_LAYOUT\n#include \"oxccl_plugin.h\"\nint oxccl_nothing;\n";
    build::c_object("layout", text, &folder())?;
    // The assertions can fail: one number that is wrong does not compile.
    let folder = std::env::temp_dir().join(format!("oxccl-wrong-header-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    let wrong = generate().replace("sizeof(oxccl_buffer) == ", "sizeof(oxccl_buffer) == 1");
    std::fs::write(folder.join("oxccl_plugin.h"), wrong).map_err(|e| e.to_string())?;
    let text = "#define OXCCL_PLUGIN_CHECK_LAYOUT\n#include \"oxccl_plugin.h\"\n";
    let result = build::c_object("layout-wrong", text, &folder);
    let _ = std::fs::remove_dir_all(&folder);
    match result {
        Err(_) => Ok(()),
        Ok(()) => Err("a wrong layout compiled".to_string()),
    }
}

/// `QueryReply` to `query_reply`.
fn snake(name: &str) -> String {
    let mut out = String::new();
    for (i, c) in name.char_indices() {
        if c.is_ascii_uppercase() && i > 0 {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

fn base(ty: &str) -> String {
    match ty {
        "u8" => "uint8_t".into(),
        "u32" => "uint32_t".into(),
        "u64" => "uint64_t".into(),
        "i32" => "int32_t".into(),
        "i64" => "int64_t".into(),
        "f64" => "double".into(),
        "c_char" => "char".into(),
        "c_void" => "void".into(),
        name => format!("oxccl_{}", snake(name)),
    }
}

/// Splits at commas that are not inside brackets.
fn arguments(list: &str) -> Vec<String> {
    let (mut depth, mut from, mut out) = (0i32, 0, Vec::new());
    for (i, c) in list.char_indices() {
        match c {
            '(' | '<' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '>' if !list[..i].ends_with('-') => depth -= 1,
            ',' if depth == 0 => {
                out.push(list[from..i].trim().to_string());
                from = i + 1;
            }
            _ => {}
        }
    }
    let last = list[from..].trim();
    if !last.is_empty() {
        out.push(last.to_string());
    }
    out
}

/// A C declaration of `name` with a Rust type.
fn declare(ty: &str, name: &str) -> String {
    let ty = ty.trim();
    if let Some(inner) = ty.strip_prefix("Option<").and_then(|t| t.strip_suffix('>')) {
        let function = inner
            .trim()
            .strip_prefix("unsafe extern \"C\" fn(")
            .unwrap_or_else(|| panic!("an Option that is no function: {ty}"));
        let mut depth = 1;
        let end = function
            .char_indices()
            .find(|(_, c)| {
                depth += i32::from(*c == '(') - i32::from(*c == ')');
                depth == 0
            })
            .map(|(i, _)| i)
            .unwrap_or_else(|| panic!("unbalanced: {ty}"));
        let list: Vec<String> = arguments(&function[..end])
            .iter()
            .map(|a| {
                let (name, ty) = a
                    .split_once(':')
                    .unwrap_or_else(|| panic!("no name: {a} in {ty}"));
                declare(ty, name.trim())
            })
            .collect();
        let returns = function[end + 1..]
            .trim()
            .strip_prefix("->")
            .map_or("void".to_string(), |r| base(r.trim()));
        return format!("{returns} (*{name})({})", list.join(", "));
    }
    if let Some(to) = ty.strip_prefix("*const ") {
        return if to.trim().starts_with('*') {
            declare(to, &format!("const *{name}"))
        } else {
            format!("const {} *{name}", base(to.trim()))
        };
    }
    if let Some(to) = ty.strip_prefix("*mut ") {
        return declare(to, &format!("*{name}"));
    }
    if let Some((element, count)) = ty
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .and_then(|t| t.split_once(';'))
    {
        return format!("{} {name}[{}]", base(element.trim()), count.trim());
    }
    format!("{} {name}", base(ty))
}

fn comment(out: &mut String, indent: &str, docs: &[&str]) {
    let text: Vec<&str> = docs.iter().map(|d| d.trim()).collect();
    let mut line = format!("{indent}/* ");
    for word in text.join(" ").replace('`', "").split(' ') {
        if line.len() + word.len() > 110 {
            let _ = writeln!(out, "{}", line.trim_end());
            line = format!("{indent} * ");
        }
        line += word;
        line += " ";
    }
    let _ = writeln!(out, "{}*/", line);
}

fn structure(out: &mut String, s: &StructLayout) {
    let name = format!("oxccl_{}", snake(s.name));
    out.push('\n');
    comment(out, "", s.docs);
    let _ = writeln!(out, "struct {name} {{");
    for f in s.fields {
        comment(out, "    ", f.docs);
        // As the compiler shows a type, it may have line breaks.
        let ty =
            f.ty.split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .replace("( ", "(");
        let _ = writeln!(out, "    {};", declare(&ty, f.name));
    }
    let _ = writeln!(out, "}};");
}

fn layout(out: &mut String, s: &StructLayout) {
    let name = format!("oxccl_{}", snake(s.name));
    let _ = writeln!(
        out,
        "OXCCL_ASSERT(sizeof({name}) == {}, \"size of {name}\");",
        s.size
    );
    for f in s.fields {
        let _ = writeln!(
            out,
            "OXCCL_ASSERT(offsetof({name}, {}) == {}, \"{name}.{}\");",
            f.name, f.offset, f.name
        );
    }
}

/// `MismatchDetection` or `all_reduce` to upper case with underscores.
fn upper(name: &str) -> String {
    snake(name).to_uppercase()
}

fn enumeration(out: &mut String, name: &str, docs: &str, items: &[(String, u32)]) {
    explained(out, name, docs, items, &[]);
}

/// With what each item means, where that is given.
fn explained(out: &mut String, name: &str, docs: &str, items: &[(String, u32)], meanings: &[&str]) {
    out.push('\n');
    comment(out, "", &[docs]);
    let _ = writeln!(out, "enum oxccl_{name} {{");
    for (i, (item, value)) in items.iter().enumerate() {
        if let Some(meaning) = meanings.get(i) {
            comment(out, "    ", &[meaning]);
        }
        let _ = writeln!(out, "    OXCCL_{item} = {value},");
    }
    let _ = writeln!(out, "}};");
}

/// `ErrorKind::PeerLost` as `PEER_LOST`.
fn kind(kind: ErrorKind) -> String {
    upper(&format!("{kind:?}"))
}

/// What the conformance suite expects of error texts and times, from the suite itself.
fn expectations(out: &mut String) {
    let _ = writeln!(
        out,
        "/* Faults that the conformance suite checks, of groups that advertise ABORT, RECONFIGURE or\n \
         * MISMATCH_DETECTION: the kind, and what the text contains as whole words. N, TAG, A and B stand for\n \
         * numbers, REASON, CAUSE, ONE, OTHER and RANKS for texts. Of a rank that died it is PEER_LOST with the rank in peer.\n *"
    );
    for text in conformance::expected::TEXTS {
        let parts: Vec<String> = text.parts.iter().map(|part| format!("\"{part}\"")).collect();
        let _ = writeln!(
            out,
            " *   {}:\n *       {}, {}",
            text.event,
            kind(text.kind),
            parts.join(" and ")
        );
    }
    out.push_str(" */\n\n");
    let _ = writeln!(
        out,
        "/* Times that it allows, with room for a busy machine. The host itself fails an operation 2 s after its\n \
         * timeout_ms and poisons the group.\n *"
    );
    for time in conformance::expected::TIMES {
        let _ = writeln!(out, " *   {}: {} s", time.what, time.at_most.as_secs());
    }
    out.push_str(" */\n\n");
}

/// `docs/plugins.md` has a row for each text and each time that the suite checks, and no other.
pub(crate) fn the_guide_lists_what_the_suite_checks() -> Result<(), String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/plugins.md");
    let guide = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let rows = |head: &str| -> Vec<String> {
        let after = guide.lines().skip_while(|line| !line.starts_with(head)).skip(2);
        after
            .take_while(|line| line.starts_with('|'))
            .map(str::to_string)
            .collect()
    };
    let texts: Vec<String> = conformance::expected::TEXTS
        .iter()
        .map(|text| {
            let parts: Vec<String> = text.parts.iter().map(|part| format!("`{part}`")).collect();
            format!("| {} | `{:?}` | {} |", text.event, text.kind, parts.join(" and "))
        })
        .collect();
    let times: Vec<String> = conformance::expected::TIMES
        .iter()
        .map(|time| format!("| {} | {} s |", time.what, time.at_most.as_secs()))
        .collect();
    for (head, wanted) in [("| event | kind |", texts), ("| time | at most |", times)] {
        let found = rows(head);
        if found != wanted {
            let wanted = wanted.join("\n");
            return Err(format!(
                "the table '{head}' of {} should be\n{wanted}\nand is\n{}",
                path.display(),
                found.join("\n")
            ));
        }
    }
    Ok(())
}

/// The whole header.
pub(crate) fn generate() -> String {
    let mut out = String::new();
    let _ = write!(
        out,
        "/* oxccl plugin ABI {}.{}: backends and device kinds as shared libraries.\n *\n \
         * Generated from crates/plugin/src/abi.rs and abi/meaning.rs, and the texts and times from\n * crates/conformance/src/expected.rs; do not edit. The rules are in docs/plugins.md.\n *\n \
         * A plugin exports two functions:\n *\n \
         *   int32_t oxccl_plugin_query_v1(oxccl_query_reply *reply);\n \
         *   int32_t oxccl_plugin_open_v1(const oxccl_host *host, oxccl_plugin *plugin, oxccl_fault *fault);\n *\n \
         * Functions return 0 if they did their work. Structs with a `size` grow at their end only: set `size` to what\n \
         * you know, and take at most what both sides know.\n */\n\
         #ifndef OXCCL_PLUGIN_H\n#define OXCCL_PLUGIN_H\n\n#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n\n\
         #ifdef __cplusplus\nextern \"C\" {{\n#endif\n\n",
        abi::MAJOR,
        abi::MINOR
    );
    for paragraph in meaning::CONDUCT {
        comment(&mut out, "", &[paragraph]);
        out.push('\n');
    }
    expectations(&mut out);
    let constants: [(&str, String); 24] = [
        ("PLUGIN_MAGIC", format!("UINT64_C({:#x})", abi::MAGIC)),
        ("PLUGIN_MAJOR", format!("{}u", abi::MAJOR)),
        ("PLUGIN_MINOR", format!("{}u", abi::MINOR)),
        ("PLUGIN_MINIMUM_MINOR", format!("{}u", abi::MINIMUM_MINOR)),
        ("NONE", "UINT32_MAX".into()),
        ("OK", abi::OK.to_string()),
        ("FAILED", abi::FAILED.to_string()),
        ("WORK_POLLED", format!("{}u", abi::WORK_POLLED)),
        ("FAULT_CODE", format!("{}u", abi::FAULT_CODE)),
        ("FAULT_RANK", format!("{}u", abi::FAULT_RANK)),
        ("FAULT_PEER", format!("{}u", abi::FAULT_PEER)),
        ("FAULT_EPOCH", format!("{}u", abi::FAULT_EPOCH)),
        ("FAULT_SEQ", format!("{}u", abi::FAULT_SEQ)),
        ("FAULT_DATA", format!("{}u", abi::FAULT_DATA)),
        ("FAULT_RETRYABLE", format!("{}u", abi::FAULT_RETRYABLE)),
        ("OPTION_HIGH_PRIORITY", format!("{}u", abi::OPTION_HIGH_PRIORITY)),
        (
            "OPTION_CGA_CLUSTER_SIZE",
            format!("{}u", abi::OPTION_CGA_CLUSTER_SIZE),
        ),
        ("OPTION_MIN_CTAS", format!("{}u", abi::OPTION_MIN_CTAS)),
        ("OPTION_MAX_CTAS", format!("{}u", abi::OPTION_MAX_CTAS)),
        ("OPTION_NET_NAME", format!("{}u", abi::OPTION_NET_NAME)),
        ("OPTION_SPLIT_SHARE", format!("{}u", abi::OPTION_SPLIT_SHARE)),
        ("OPTION_BLOCKING", format!("{}u", abi::OPTION_BLOCKING)),
        ("OPTION_TRAFFIC_CLASS", format!("{}u", abi::OPTION_TRAFFIC_CLASS)),
        ("DETAIL_END", "0x1f".into()),
    ];
    for (name, value) in constants {
        let _ = writeln!(out, "#define OXCCL_{name} {value}");
    }
    let numbered = |names: &mut dyn Iterator<Item = (String, u32)>| names.collect::<Vec<_>>();
    let ops = numbered(
        &mut OpKind::ALL
            .iter()
            .map(|o| (format!("OP_{}", o.name().to_uppercase()), o.code().into())),
    );
    explained(
        &mut out,
        "op",
        "Operations, and what oxccl_operation.buffers holds for each. n is the number of ranks; counts are in elements.",
        &ops,
        &meaning::OPERATIONS.map(|(_, means)| means),
    );
    let dtypes = numbered(
        &mut DType::ALL
            .iter()
            .map(|d| (format!("DTYPE_{}", d.name().to_uppercase()), d.code().into())),
    );
    enumeration(&mut out, "dtype", "Element types.", &dtypes);
    let count = u8::try_from(ReduceOp::COUNT).unwrap_or(u8::MAX);
    let reduces = numbered(&mut (0..count).map(|c| (ReduceOp::name_of(c).to_uppercase(), c.into())));
    enumeration(&mut out, "reduce", "Reductions.", &reduces);
    let features = numbered(
        &mut Feature::ALL
            .iter()
            .map(|f| (format!("FEATURE_{}", upper(&format!("{f:?}"))), *f as u32)),
    );
    explained(
        &mut out,
        "feature",
        "Features of a group, and what a plugin that advertises one has to do.",
        &features,
        &meaning::FEATURES.map(|(_, means)| means),
    );
    let kinds = numbered(
        &mut oxccl_plugin::abi::ERROR_KINDS
            .iter()
            .map(|(code, name)| ((*name).to_string(), *code)),
    );
    enumeration(
        &mut out,
        "error_kind",
        "What a caller can do about a fault.",
        &kinds,
    );
    let reasons = numbered(
        &mut oxccl_plugin::abi::REASONS
            .iter()
            .map(|(code, name)| (format!("REASON_{name}"), *code)),
    );
    enumeration(
        &mut out,
        "reason",
        "Why a backend cannot be used; parts in oxccl_fault.detail.",
        &reasons,
    );
    let levels = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
    let levels = numbered(&mut (1..).zip(levels).map(|(n, l)| (format!("LEVEL_{l}"), n)));
    enumeration(
        &mut out,
        "level",
        "Levels of log events, from the gravest.",
        &levels,
    );
    out.push('\n');
    for s in abi::STRUCTS {
        let name = format!("oxccl_{}", snake(s.name));
        let _ = writeln!(out, "typedef struct {name} {name};");
    }
    for s in abi::STRUCTS {
        structure(&mut out, s);
    }
    out.push_str(EPILOGUE);
    out.push_str(
        "\n#ifdef OXCCL_PLUGIN_CHECK_LAYOUT\n#ifdef __cplusplus\n#define OXCCL_ASSERT static_assert\n#else\n\
         #define OXCCL_ASSERT _Static_assert\n#endif\n",
    );
    for s in abi::STRUCTS {
        layout(&mut out, s);
    }
    out.push_str("#endif\n\n#ifdef __cplusplus\n}\n#endif\n\n#endif\n");
    out
}

const EPILOGUE: &str = r#"
#if defined(__GNUC__)
#define OXCCL_EXPORT __attribute__((visibility("default")))
#else
#define OXCCL_EXPORT
#endif

/* The two functions of a plugin. */
OXCCL_EXPORT int32_t oxccl_plugin_query_v1(oxccl_query_reply *reply);
OXCCL_EXPORT int32_t oxccl_plugin_open_v1(const oxccl_host *host, oxccl_plugin *plugin, oxccl_fault *fault);

/* A text that ends with a zero, lent. */
static inline oxccl_str oxccl_text(const char *text) {
    oxccl_str s;
    s.ptr = text;
    s.len = text ? strlen(text) : 0;
    return s;
}

/* Fills in a fault and returns what the failing function has to return. */
static inline int32_t oxccl_fail(oxccl_fault *fault, uint32_t kind, const char *text) {
    if (fault) {
        size_t len = strlen(text);
        fault->kind = kind;
        fault->text_len = (uint32_t)(len < sizeof fault->text ? len : sizeof fault->text);
        memcpy(fault->text, text, fault->text_len);
    }
    return OXCCL_FAILED;
}

/* Writes one fault over another, which keeps its size. */
static inline void oxccl_fault_copy(oxccl_fault *to, const oxccl_fault *from) {
    uint64_t size = to->size;
    memcpy(to, from, (size_t)(size < from->size ? size : from->size));
    to->size = size;
}
"#;
