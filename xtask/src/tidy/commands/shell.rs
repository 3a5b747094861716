//! The commands of documents: those of their `sh` blocks, and those that stand between backticks in the prose; and whether a command line fits a
//! grammar of clap's.
//!
//! The rule `command` of `tidy` reads cargo's; tests of the programs include this file by its path and read their own.

/// A command as a document has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Documented {
    /// The line on which it begins, from 1.
    pub(crate) line: usize,
    /// The program and its arguments, without assignments before it.
    pub(crate) words: Vec<String>,
    /// In a block of its own, so that it is complete. One in the prose may leave out what is not meant.
    pub(crate) is_whole: bool,
    /// The folder that a command before it on its line or in its block went to.
    pub(crate) folder: Option<String>,
}

/// The commands of a document in Markdown, in their order.
pub(crate) fn documented(text: &str) -> Vec<Documented> {
    let mut found = Vec::new();
    let mut fence: Option<bool> = None;
    let mut folder = None;
    let mut lines = (1..).zip(text.lines());
    while let Some((line, text)) = lines.next() {
        let trimmed = text.trim();
        if let Some(language) = trimmed.strip_prefix("```") {
            fence = match fence {
                None => Some(language == "sh"),
                Some(_) => None,
            };
            folder = None;
            continue;
        }
        match fence {
            Some(true) => {
                let mut whole = trimmed.to_owned();
                while let Some(begun) = whole.strip_suffix('\\') {
                    let (_, next) = lines.next().unwrap_or_default();
                    whole = format!("{begun}{}", next.trim());
                }
                block_line(line, &whole, &mut folder, &mut found);
            }
            Some(false) => {}
            None => {
                // Every second part stands between backticks.
                for code in trimmed.split('`').skip(1).step_by(2) {
                    let words = split(code).concat();
                    found.push(Documented {
                        line,
                        words,
                        is_whole: false,
                        folder: None,
                    });
                }
            }
        }
    }
    found.retain(|command| !command.words.is_empty());
    found
}

fn block_line(line: usize, text: &str, folder: &mut Option<String>, found: &mut Vec<Documented>) {
    for mut words in split(text) {
        // A prompt, assignments, and what starts another program in its place.
        let skip = words
            .iter()
            .take_while(|word| {
                let name = word.split('=').next().unwrap_or_default();
                let is_name = !name.is_empty()
                    && name
                        .bytes()
                        .all(|b| b.is_ascii_uppercase() || b"_0123456789".contains(&b));
                word.ends_with('$')
                    || (word.contains('=') && is_name)
                    || ["exec", "nice", "env"].contains(&word.as_str())
            })
            .count();
        words.drain(..skip);
        let is = |at: usize, word: &str| words.get(at).is_some_and(|w| w == word);
        let script = words
            .len()
            .checked_sub(3)
            .filter(|&at| is(at, "sh") && is(at + 1, "-c"));
        if let (true, Some(to)) = (is(0, "cd"), words.get(1)) {
            *folder = Some(to.clone());
        } else if let Some(script) = script.and_then(|at| words.get(at + 2)) {
            block_line(line, script, folder, found);
        } else {
            found.push(Documented {
                line,
                words,
                is_whole: true,
                folder: folder.clone(),
            });
        }
    }
}

/// Ends a word, and with it the command if another one comes.
fn end(word: &mut Option<String>, commands: &mut Vec<Vec<String>>, is_last: bool) {
    if let (Some(word), Some(command)) = (word.take(), commands.last_mut()) {
        command.push(word);
    }
    if is_last {
        commands.push(Vec::new());
    }
}

/// The words of each command of a line, as a shell splits them; a comment is left out.
pub(crate) fn split(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if q == c => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ';' | '&' | '|' | '>' | '<') => end(&mut word, &mut commands, true),
            (None, c) if c.is_whitespace() => end(&mut word, &mut commands, false),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    end(&mut word, &mut commands, false);
    commands.retain(|command| !command.is_empty());
    commands
}

/// What of `words`, the arguments after the program's name, `grammar` does not know: a subcommand, or an option. Values are not looked at.
pub(crate) fn unknown(grammar: &clap::Command, words: &[String]) -> Option<String> {
    let mut grammar = grammar.clone();
    grammar.build();
    let mut at = &grammar;
    let mut path = at.get_name().to_owned();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--" {
            return None;
        }
        if let Some(option) = word.strip_prefix("--") {
            let (option, has_value) = option.split_once('=').map_or((option, false), |(o, _)| (o, true));
            let find = |command: &clap::Command| {
                let mut all = command.get_arguments();
                let found = all.find(|a| {
                    a.get_long_and_visible_aliases()
                        .is_some_and(|names| names.contains(&option))
                });
                found.map(|a| a.get_action().takes_values())
            };
            match find(at).or_else(|| find(&grammar)) {
                Some(true) if !has_value => {
                    words.next();
                }
                Some(_) => {}
                None => return Some(format!("'{path}' has no option '--{option}'")),
            }
        } else if at.has_subcommands() && !word.starts_with(['-', '…', '.']) {
            match at.find_subcommand(word) {
                Some(sub) => {
                    at = sub;
                    path = format!("{path} {}", sub.get_name());
                }
                None => {
                    return Some(format!("'{path}' has no command '{word}'"));
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn blocks_and_prose_give_their_commands_with_lines_and_folders() {
        let text = "Run `oxccl why`, not `x.rs`.\n```sh\nhostA$ A=1 oxccl a --b 'c d' && e f:  # g\ncd python && cargo run \\\n  --bin h &\n\
                    srun sh -c 'exec oxccl i'\n```\n```text\noxccl no\n```\n";
        let found: Vec<(usize, String, bool, Option<String>)> = documented(text)
            .into_iter()
            .map(|c| (c.line, c.words.join(" "), c.is_whole, c.folder))
            .collect();
        let python = Some("python".to_owned());
        assert_eq!(
            found,
            [
                (1, "oxccl why".to_owned(), false, None),
                (1, "x.rs".to_owned(), false, None),
                (3, "oxccl a --b c d".to_owned(), true, None),
                (3, "e f:".to_owned(), true, None),
                (4, "cargo run --bin h".to_owned(), true, python.clone()),
                (6, "oxccl i".to_owned(), true, python),
            ]
        );
    }

    #[test]
    fn a_command_or_an_option_that_the_grammar_lacks_is_named() {
        let grammar = clap::Command::new("p")
            .subcommand(clap::Command::new("a").arg(clap::Arg::new("b").long("b").num_args(1)))
            .arg(clap::Arg::new("c").long("c").num_args(1).global(true));
        assert_eq!(unknown(&grammar, &words("a --b x --c=1 -- --d")), None);
        assert_eq!(unknown(&grammar, &words("--c a a --b x")), None);
        assert_eq!(
            unknown(&grammar, &words("z")),
            Some("'p' has no command 'z'".to_owned())
        );
        assert_eq!(
            unknown(&grammar, &words("a --d")),
            Some("'p a' has no option '--d'".to_owned())
        );
    }
}
