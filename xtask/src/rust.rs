// SPDX-License-Identifier: Apache-2.0
//! Small questions about Rust source that several checks ask: parse it, is this test-only, how many lines of code.

use std::ops::RangeInclusive;

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::{Attribute, Item};

use crate::findings::Finding;
use crate::tree::SourceFile;

/// Parses `file`, or says where it does not parse.
pub fn parse(file: &SourceFile) -> Result<syn::File, Finding> {
    syn::parse_file(&file.text).map_err(|error| {
        let place = format!("{}:{}", file.path, error.span().start().line);
        Finding::breach(place, format!("does not parse: {error}"))
    })
}

/// Whether the attributes say `#[cfg(test)]`.
pub fn is_test_only(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| {
        attr.path().is_ident("cfg") && attr.parse_args::<syn::Ident>().is_ok_and(|condition| condition == "test")
    })
}

/// The lines of each inline module that is compiled for tests only.
pub fn test_modules(ast: &syn::File) -> Vec<RangeInclusive<usize>> {
    ast.items
        .iter()
        .filter_map(|item| match item {
            Item::Mod(module) if module.content.is_some() && is_test_only(&module.attrs) => {
                Some(item.span().start().line..=item.span().end().line)
            }
            _ => None,
        })
        .collect()
}

/// Lines of `text` within `lines` (1-based) that hold code: not blank, not only a comment.
pub fn code_lines(text: &str, lines: RangeInclusive<usize>) -> usize {
    text.lines()
        .enumerate()
        .filter(|(index, line)| {
            let line = line.trim();
            lines.contains(&(index + 1)) && !line.is_empty() && !line.starts_with("//")
        })
        .count()
}

/// Lines at which the word `word` stands as an identifier or keyword, macro bodies included, comments and strings not.
pub fn lines_with_word(tokens: TokenStream, word: &str) -> Vec<usize> {
    let mut lines = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Ident(ident) if ident == word => lines.push(ident.span().start().line),
            TokenTree::Group(group) => lines.extend(lines_with_word(group.stream(), word)),
            _ => {}
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_lines_leave_out_blank_lines_and_comments() {
        let text = "// head\n\nfn f() {\n    // why\n    g();\n}\n";
        assert_eq!(code_lines(text, 1..=6), 3);
        assert_eq!(code_lines(text, 5..=5), 1);
    }

    #[test]
    fn a_test_module_is_found_with_its_lines() {
        let ast = syn::parse_file("fn f() {}\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n#[cfg(unix)]\nmod m {}\n")
            .unwrap();
        assert_eq!(test_modules(&ast), [2..=5]);
    }

    #[test]
    fn words_are_seen_in_macros_and_not_in_text() {
        let tokens = "// unsafe\nfn f() { m!(unsafe { 1 }); g(\"unsafe\"); }\n#![forbid(unsafe_code)]".parse().unwrap();
        assert_eq!(lines_with_word(tokens, "unsafe"), [2]);
    }
}
