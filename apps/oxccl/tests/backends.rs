//! `oxccl backends` as its user meets it: the table, the JSON, and the table of defaults.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;

use breach::breach;

mod breach;

fn backends(arguments: &[&str], defaults: &str) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .arg("backends")
        .args(arguments)
        .env_remove("OXCCL_LOG")
        .env("OXCCL_DEFAULT_BACKEND", defaults)
        .output()
        .unwrap();
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), lossy(&output.stdout), lossy(&output.stderr))
}

#[test]
fn the_table_says_where_gloo_is_from_that_it_is_usable_and_what_it_offers() {
    let (code, brief, err) = backends(&[], "");
    assert_eq!(code, Some(0), "{err}");
    assert!(!brief.contains("operations"), "one line for each: {brief}");
    let (code, out, err) = backends(&["--backend", "GLOO"], "");
    assert_eq!(code, Some(0), "{err}");
    assert!(
        brief
            .lines()
            .any(|l| out.lines().any(|all| all == l && l.starts_with("gloo"))),
        "{brief}{out}"
    );
    let line = |head: &str| {
        let found = out.lines().find(|l| l.trim_start().starts_with(head));
        found.unwrap_or_else(|| panic!("no line '{head}' in\n{out}"))
    };
    let gloo = line("gloo");
    for cell in [
        "cpu",
        env!("CARGO_PKG_VERSION"),
        "built in (backend-gloo)",
        "yes, the default for cpu",
    ] {
        assert!(gloo.contains(cell), "{gloo}");
    }
    assert!(line("operations").contains("all_reduce broadcast"));
    assert!(line("moves").contains("f8e5m2"));
    assert!(line("reduces").contains("sum") && line("reduces").contains("bf16"));
    assert!(line("features").contains("abort reconfigure"));
    assert_eq!(line("conflicts"), "conflicts: none");
    assert_eq!(
        line("defaults"),
        "defaults: cpu:gloo, cuda:nccl, hpu:hccl, xpu:xccl"
    );
}

#[test]
fn the_json_has_the_same_and_follows_the_default_table() {
    let (code, out, err) = backends(&["--json"], "CPU: other");
    assert_eq!(code, Some(0), "{err}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let gloo = json["backends"].as_array().unwrap();
    let gloo = gloo.iter().find(|b| b["name"] == "gloo").unwrap();
    assert_eq!(gloo["device"], "cpu");
    assert_eq!(gloo["usable"], true);
    assert_eq!(gloo["reason"], serde_json::Value::Null);
    assert_eq!(gloo["default"], false);
    assert_eq!(gloo["source"]["kind"], "built in");
    assert!(
        gloo["operations"]
            .as_array()
            .unwrap()
            .iter()
            .any(|o| o == "all_to_all_into")
    );
    // f8 is moved and in no reduction.
    assert!(gloo["moves"].as_array().unwrap().iter().any(|d| d == "f8e4m3"));
    assert!(
        !gloo["reductions"].to_string().contains("f8"),
        "{}",
        gloo["reductions"]
    );
    assert!(gloo["reductions"].to_string().contains("bf16"));
    assert_eq!(json["defaults"]["cpu"], "other");
    assert_eq!(json["conflicts"], serde_json::json!([]));
}

#[test]
fn a_wrong_default_table_is_exit_code_2_and_names_variable_and_position() {
    let (code, out, err) = backends(&[], "cpu:gloo, hpu");
    assert_eq!(code, Some(2), "{err}");
    assert!(out.is_empty(), "{out}");
    assert!(
        err.contains("OXCCL_DEFAULT_BACKEND") && err.contains("character 11"),
        "{err}"
    );
}

#[test]
fn a_backend_that_is_not_known_is_an_error_of_the_probe_with_a_suggestion() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .args(["backends-probe", "glo", "cpu"])
        .arg(dir.path().join("reason"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("Did you mean 'gloo'?"), "{err}");
}

#[test]
fn one_backend_that_is_not_known_is_exit_code_2_with_a_suggestion() {
    let (code, out, err) = backends(&["--backend", "glo"], "");
    assert_eq!(code, Some(2), "{err}");
    assert!(
        out.is_empty() && err.contains("Did you mean 'gloo'?"),
        "{out}{err}"
    );
}

#[test]
fn what_a_plugin_says_and_prints_does_not_break_the_list() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    // Its path need not be text.
    let below = folder.path().join(std::ffi::OsStr::from_bytes(b"not\xfftext"));
    std::fs::create_dir(&below).unwrap();
    let library = breach(&below, &["-DLONG_VERSION", "-DPRINTS"]);
    let list = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
            .arg("backends")
            .args(arguments)
            .env("OXCCL_LOG", "off")
            .env("OXCCL_PLUGIN_PATH", &library)
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{err}");
        (String::from_utf8(output.stdout).unwrap(), err)
    };
    let (out, err) = list(&["--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(err.contains("hello from a constructor"), "{err}");
    let of = |json: &serde_json::Value| {
        let all = json["backends"].as_array().unwrap();
        all.iter().find(|b| b["name"] == "breach").unwrap().clone()
    };
    assert_eq!(of(&json)["usable"], true, "{}", of(&json)["reason"]);
    let (out, _) = list(&[]);
    assert!(!out.contains('\u{1b}') && out.contains("7777…"), "{out}");
    assert!(out.lines().all(|l| l.chars().count() < 2000), "{out}");

    breach(&below, &["-DBREACH=\"unreadable\""]);
    let json: serde_json::Value = serde_json::from_str(&list(&["--json"]).0).unwrap();
    assert_eq!(of(&json)["usable"], false);
    assert!(
        of(&json)["reason"].as_str().unwrap().contains("capabilities"),
        "{json}"
    );
}

fn plugin(package: &str) -> String {
    conformance::dylib(package).unwrap().display().to_string()
}

#[test]
fn plugins_are_listed_with_who_wins_and_why_the_others_are_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libtext.so");
    std::fs::write(&text, "no library").unwrap();
    let plugin = plugin("gloo-plugin");
    let list = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
            .arg("backends")
            .args(arguments)
            .env("OXCCL_LOG", "off")
            .env(
                "OXCCL_PLUGIN_PATH",
                format!("{plugin}:{}", folder.path().display()),
            )
            .env("OXCCL_PLUGIN_LIB_HCCL", "/nowhere/libhccl.so")
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let json: serde_json::Value = serde_json::from_str(&list(&["--json"])).unwrap();
    let gloo = json["backends"].as_array().unwrap();
    let gloo = gloo.iter().find(|b| b["name"] == "gloo").unwrap();
    assert_eq!(gloo["source"]["kind"], "plugin");
    assert_eq!(gloo["source"]["origin"], plugin);
    assert_eq!((&gloo["usable"], &gloo["default"]), (&true.into(), &true.into()));
    assert_eq!(json["conflicts"][0]["winner"]["kind"], "plugin");
    assert_eq!(json["conflicts"][0]["loser"]["origin"], "backend-gloo");
    let plugins = json["plugins"].as_array().unwrap();
    let of = |path: &str| plugins.iter().find(|p| p["path"] == path).unwrap();
    assert_eq!(
        (&of(&plugin)["used"], &of(&plugin)["abi_minor"]),
        (&true.into(), &0.into())
    );
    assert_eq!(of(text.to_str().unwrap())["unavailable"], "library_not_loadable");
    let missing = of("/nowhere/libhccl.so");
    assert_eq!(missing["unavailable"], "library_not_found");
    assert_eq!(missing["variable"], "OXCCL_PLUGIN_LIB_HCCL");

    let table = list(&[]);
    assert!(table.contains(&format!("plugin ({plugin})")), "{table}");
    assert!(
        table.contains("plugin: /nowhere/libhccl.so (OXCCL_PLUGIN_LIB_HCCL): not used:"),
        "{table}"
    );
    assert!(table.contains("conflict: gloo for cpu"), "{table}");
}

#[test]
fn texts_of_a_plugin_neither_act_on_the_terminal_nor_forge_a_line_whatever_the_command() {
    use ftcore::printable::is_active;
    let library = plugin("odd-plugin");
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_oxccl"))
            .args(arguments)
            .env("OXCCL_LOG", "info")
            .env("OXCCL_PLUGIN_PATH", &library)
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    // What the plugin prints itself goes to standard error as it is, without standing in the results.
    let (code, out, err) = run(&["backends", "--json"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(!out.contains(is_active), "{out:?}");
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let rude = json["backends"].as_array().unwrap();
    let rude = rude.iter().find(|b| b["name"] == "rude").unwrap();
    assert_eq!(
        (&rude["usable"], &rude["unavailable"]),
        (&false.into(), &"init_failed".into())
    );
    assert!(err.contains("rude capabilities"), "it printed nothing: {err}");
    for arguments in [
        &["backends"][..],
        &["backends", "--backend", "rude"],
        &["bench", "--backend", "rude", "--ranks", "2", "--sizes", "4"],
        &["conformance", "--plugin", &library, "--backend", "rude"],
    ] {
        let (code, out, err) = run(arguments);
        let own: Vec<&str> = err
            .lines()
            .filter(|l| l.starts_with("error") || l.starts_with("oxccl") || l.contains("WARN"))
            .collect();
        assert!(!out.contains(is_active), "{arguments:?}: {out:?}");
        assert!(!own.concat().contains(is_active), "{arguments:?}: {own:?}");
        for line in out.lines().chain(own) {
            assert!(!line.starts_with("2026-01-01"), "{arguments:?} forged: {line}");
        }
        let said = if code == Some(0) { &out } else { &err };
        assert!(said.contains("\\u{1b}[2J"), "{arguments:?}: {out}{err}");
        assert_eq!(
            code,
            Some(if arguments[0] == "backends" { 0 } else { 2 }),
            "{arguments:?}: {err}"
        );
    }
}
