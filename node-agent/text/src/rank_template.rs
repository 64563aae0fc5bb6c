//! The prompt with which a model for ranking is asked how well a document answers a query. It is a text with two places to fill in, and no
//! Jinja: that is how llama.cpp's converter writes it.

use prima_gguf::{GgufError, Metadata};

/// A text in which `{query}` and `{document}` stand for the two.
#[derive(Clone, Debug)]
pub struct RankTemplate(String);

const KEY: &str = "tokenizer.chat_template.rerank";
const QUERY: &str = "{query}";
const DOCUMENT: &str = "{document}";

impl RankTemplate {
    /// The file's template; `None` where it has none that names both.
    ///
    /// # Errors
    /// The key is no string.
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Self>, GgufError> {
        let template = metadata.str(KEY)?;
        let names_both = |text: &&str| text.contains(QUERY) && text.contains(DOCUMENT);
        let template = template.filter(names_both);
        Ok(template.map(|text| Self(text.to_owned())))
    }

    /// The prompt. What the two texts say is no place to fill in.
    pub fn render(&self, query: &str, document: &str) -> String {
        let mut prompt = String::with_capacity(self.0.len() + query.len() + document.len());
        let mut rest = self.0.as_str();
        while let Some(place) = rest.find('{') {
            let (before, after) = rest.split_at(place);
            prompt.push_str(before);
            let filled = [(QUERY, query), (DOCUMENT, document)]
                .into_iter()
                .find_map(|(name, text)| Some((after.strip_prefix(name)?, text)));
            rest = match filled {
                Some((after, text)) => {
                    prompt.push_str(text);
                    after
                }
                None => {
                    prompt.push('{');
                    &after[1..]
                }
            };
        }
        prompt + rest
    }
}

#[cfg(test)]
mod tests {
    use prima_gguf::Value;

    use super::*;

    fn template(text: &str) -> Option<RankTemplate> {
        let entries = vec![(KEY.to_owned(), Value::String(text.to_owned()))];
        let metadata = Metadata::new("test", entries).unwrap();
        RankTemplate::from_gguf(&metadata).unwrap()
    }

    #[test]
    fn both_texts_stand_where_the_template_names_them() {
        let template = template("Q: {query} {x} D: {document}, {query}{").unwrap();
        let prompt = template.render("why {document}?", "so {query}");
        assert_eq!(
            prompt,
            "Q: why {document}? {x} D: so {query}, why {document}?{"
        );
    }

    #[test]
    fn a_template_without_both_is_none() {
        assert!(template("{query} only").is_none());
        let empty = Metadata::new("test", Vec::new()).unwrap();
        assert!(RankTemplate::from_gguf(&empty).unwrap().is_none());
    }
}
