# Our own source, the last layer: /opt/cog-triton/.../cog_triton and the Cog project in /src.
# It depends on no other derivation: a change moves this layer alone.
{ pkgs }:
let
  inherit (pkgs) lib;

  tree =
    name:
    builtins.path {
      inherit name;
      path = ../. + "/${name}";
      filter = path: _: !(lib.hasSuffix ".pyc" path || baseNameOf path == "__pycache__");
    };
  package = tree "cog_triton";
  models = tree "triton_model_repo";

  version = lib.head (
    builtins.match ".*__version__ = \"([^\"]+)\".*" (builtins.readFile ../cog_triton/__init__.py)
  );
in
{
  inherit version package;

  # A venv's package directory and script, and `cog` ("runner" or "builder") as /src; `beside` are
  # other Cog projects, as directories in it.
  # python: { version, home }: the interpreter's X.Y and the directory it is found in.
  layer =
    {
      python,
      cog,
      beside ? [ ],
    }:
    pkgs.runCommand "cog-triton-source-${cog}"
      {
        allowedReferences = [ ];
        script = ''
          #!/opt/cog-triton/bin/python
          from cog_triton.cli.app import app

          app()
        '';
        passAsFile = [ "script" ];
      }
      ''
        venv=$out/opt/cog-triton
        site=$venv/lib/python${python.version}/site-packages
        mkdir -p $site $venv/bin $out/src
        cp -r ${package} $site/cog_triton
        chmod -R u+w $site/cog_triton
        mkdir $site/cog_triton/_data
        cp -r ${models} $site/cog_triton/_data/triton_model_repo
        for project in ${tree "runner"} ${tree "builder"} ${tree "mock_cog_triton"}; do
          cp -r $project $site/cog_triton/_data/''${project##*-}
        done
        install -m 555 "$scriptPath" $venv/bin/cog-triton

        cp -r ${tree cog}/. $out/src/
        chmod u+w $out/src
        cp -r ${models} $out/src/triton_model_repo
        ${lib.concatMapStringsSep "\n" (other: "cp -r ${tree other} $out/src/${other}") beside}
      '';

  # What is read from the Cog project when an image is described.
  schema = cog: builtins.toJSON (lib.importJSON (../. + "/${cog}/.cog/openapi_schema.json"));
}
