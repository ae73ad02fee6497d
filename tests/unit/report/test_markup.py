from wandistiller.report.markup import tag


def test_texts_and_attributes_are_escaped_and_elements_are_not():
    inner = tag("b", "<i> & co")
    assert inner == "<b>&lt;i&gt; &amp; co</b>"
    assert tag("p", inner, '"', title='"><script>', class_="x") == (
        '<p title="&quot;&gt;&lt;script&gt;" class="x"><b>&lt;i&gt; &amp; co</b>&quot;</p>'
    )


def test_attributes():
    assert tag("img", alt="", width=3, hidden=None) == '<img alt="" width="3">'
    assert tag("text", x=1 / 3, y=2.0, text_anchor="end") == '<text x="0.33" y="2" text-anchor="end"></text>'
