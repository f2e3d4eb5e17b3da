{
  description = "cog-triton: from a YAML file to a served LLM; one image per GPU architecture";

  inputs = {
    nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";
    # With the nixpkgs that it was made for: its patch of skopeo fits few versions of it.
    nix2container.url = "github:nlewo/nix2container";
  };

  outputs = inputs: import ./nix inputs;
}
